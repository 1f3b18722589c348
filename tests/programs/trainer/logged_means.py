"""A rank that logs a number of each micro-batch, and the first rank another."""

from typing import Any

from programs.run import folder, rank, tell
from tiny import Net, arguments, rows

import ctrainer

seen: list[float] = []


class Own(ctrainer.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        value = inputs["x"].double().mean()
        seen.append(float(value))
        self.log_mean("own", value)
        if rank == 0:
            self.log_mean("first", 7.0)
        return super().compute_loss(model, inputs, *args, **kwargs)


args = arguments(
    output_dir=folder, max_steps=4, logging_steps=4, per_device_train_batch_size=5,
    gradient_accumulation_steps=2,
)  # fmt: skip
trainer = Own(Net(), args, train_dataset=rows(90))
trainer.remove_callback(ctrainer.PrinterCallback)
trainer.train()
tell({"seen": seen, "logged": [e for e in trainer.state.log_history if "loss" in e]})
