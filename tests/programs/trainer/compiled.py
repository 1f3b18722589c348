"""A rank trains with torch_compile, then without: what both log."""

from compiled_trainings import trained
from programs.run import folder, options, tell

kind = options.pop("kind")
seen = trained(folder, kind, **options)
plain = trained(folder, kind, **{**options, "torch_compile_backend": None})
tell(
    {
        "logged": seen.logged.tolist(),
        "plain": plain.logged.tolist(),
        "wrapper": type(seen.trainer.model_wrapped).__name__,
        "graphs": seen.graphs,
    }
)
