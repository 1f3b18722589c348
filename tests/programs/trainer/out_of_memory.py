"""A rank whose passes run out of memory at its own times: losses and weights of its run
and of one without."""

import random
from typing import Any

import torch
from programs.run import folder, options, rank, tell
from tiny import Net, arguments, rows

import ctrainer


class Failing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draw, self.failed = random.Random(rank), 0

    def forward(self, x: Any, labels: Any = None) -> Any:
        outputs = super().forward(x, labels)
        if self.training and outputs["loss"].requires_grad:
            outputs["loss"].register_hook(lambda grad: self.check(len(x)))
            self.check(len(x))
        return outputs

    def check(self, n: int) -> None:
        if n > 1 and self.draw.random() < options["rate"]:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def trained(cls: type[Net], at: str) -> tuple[Any, list[float], list[float]]:
    torch.manual_seed(3)
    args = arguments(
        output_dir=f"{folder}/{at}", max_steps=12, seed=5, logging_steps=1,
        per_device_train_batch_size=5, gradient_accumulation_steps=2,
        learning_rate=1e-2, auto_find_batch_size=True,
    )  # fmt: skip
    trainer = ctrainer.Trainer(cls(), args, train_dataset=rows(60))
    trainer.remove_callback(ctrainer.PrinterCallback)
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    weights = [float(x) for p in trainer.model.parameters() for x in p.flatten()]
    return trainer, losses, weights


plain, failing = trained(Net, "plain"), trained(Failing, "failing")
tell(
    {
        "plain": plain[1:],
        "failing": failing[1:],
        "failed": failing[0].model.failed,
    }
)
