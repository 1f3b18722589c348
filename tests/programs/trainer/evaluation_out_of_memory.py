"""A rank whose evaluation runs out of memory at its own times, and one without: their
metrics and predictions."""

import random
from typing import Any

import numpy as np
import torch
from programs.run import folder, rank, tell
from tiny import Net, arguments, rows

import ctrainer


class Failing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draw, self.failed = random.Random(rank), 0

    def forward(self, x: Any, labels: Any = None) -> Any:
        if len(x) > 2 and self.draw.random() < (0.3, 0.6)[rank]:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return super().forward(x, labels)


def metrics(p: Any) -> dict[str, float]:
    return {"mean": float(np.mean((p.predictions - p.label_ids) ** 3))}


def predicted(cls: type[Net], at: str) -> Any:
    args = arguments(
        output_dir=f"{folder}/{at}", per_device_eval_batch_size=5,
        auto_find_batch_size=True,
    )  # fmt: skip
    trainer = ctrainer.Trainer(cls(), args, compute_metrics=metrics)
    return trainer, trainer.predict(rows(83))


(_, plain), (trainer, failing) = predicted(Net, "plain"), predicted(Failing, "failing")
kept = ("test_loss", "test_mean")
tell(
    {
        "plain": [plain.metrics[name] for name in kept],
        "failing": [failing.metrics[name] for name in kept],
        "failed": trainer.model.failed,
        "same_predictions": bool(
            np.allclose(plain.predictions, failing.predictions, rtol=1e-6)
        ),
        "same_labels": bool((plain.label_ids == failing.label_ids).all()),
    }
)
