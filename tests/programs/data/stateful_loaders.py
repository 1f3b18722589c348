"""Runs whose loaders say where they are, and runs that resume them."""

from pathlib import Path

from programs.run import folder, options, rank, tell, world
from stateful_loaders import Noted, trainer_of
from tiny import Net, arguments

import ctrainer

found = []
for number, (kind, workers) in enumerate(options["cases"]):
    noted = Noted(Path(folder) / f"{number}-rows-{rank}")
    runs = []
    for resumed in (False, True):
        args = arguments(
            output_dir=f"{folder}/{number}", max_steps=8, save_steps=5,
            save_strategy="no" if resumed else "steps", ddp_timeout=60,
        )  # fmt: skip
        trainer = trainer_of(
            ctrainer, args, Net(), kind, noted, workers, rank, world
        )  # fmt: skip
        trainer.remove_callback(ctrainer.PrinterCallback)
        seen = []
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["x"].tolist()),
            with_kwargs=True,
        )
        trainer.train(f"{folder}/{number}/checkpoint-5" if resumed else None)
        losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
        runs.append({"losses": losses, "rows": noted.read(), "seen": seen})
    found.append(runs)
tell(found)
