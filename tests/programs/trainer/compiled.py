"""A rank, or a process alone, trains with torch_compile: what it logs, and its peak of
memory."""

from compiled_trainings import peak_megabytes, trained
from programs.run import folder, options, tell

plain = options.pop("beside_plain", False)
kind, theirs = options.pop("kind"), options.pop("theirs", False)
seen = trained(folder, kind, theirs, **options)
found = {"peak": peak_megabytes(), "logged": seen.logged.tolist()}
if plain:
    found["plain"] = trained(
        folder, kind, theirs, **{**options, "torch_compile_backend": None}
    ).logged.tolist()
found["wrapper"] = type(seen.trainer.model_wrapped).__name__
found["graphs"] = seen.graphs
tell(found)
