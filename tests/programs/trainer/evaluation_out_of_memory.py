"""A rank whose evaluation runs out of memory at its own times, and one without: their
metrics and predictions."""

import random
from typing import Any

import numpy as np
import torch
from programs.run import rank, tell
from tiny import Net, arguments, gpt2, rows, tokens

import ctrainer


class Fails:
    """In the forward passes of a model."""

    def __init__(self) -> None:
        self.draw, self.failed = random.Random(rank), 0

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        rows = len(next(iter(kwargs.values())))
        if not module.training and rows > 2 and self.draw.random() < (0.3, 0.6)[rank]:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def metrics(p: Any) -> dict[str, float]:
    return {"mean": float(np.mean(p.predictions.astype(np.float64) ** 3))}


def predicted(name: str, fails: Fails | None) -> Any:
    """gpt2's loss is divided by the targets of all ranks, net's by the rows."""
    args = arguments(per_device_eval_batch_size=5, auto_find_batch_size=True)
    model = gpt2() if name == "gpt2" else Net()
    if fails is not None:
        model.register_forward_pre_hook(fails, with_kwargs=True)
    trainer = ctrainer.Trainer(model, args, compute_metrics=metrics)
    return trainer.predict(tokens(83, padded=True) if name == "gpt2" else rows(83))


kept = ("test_loss", "test_mean")
found = []
for name in ("net", "gpt2"):
    fails = Fails()
    plain, failing = predicted(name, None), predicted(name, fails)
    found.append(
        {
            "plain": [plain.metrics[name] for name in kept],
            "failing": [failing.metrics[name] for name in kept],
            "failed": fails.failed,
            "same_predictions": bool(
                np.allclose(plain.predictions, failing.predictions, rtol=1e-5)
            ),
            "same_labels": bool((plain.label_ids == failing.label_ids).all()),
        }
    )
tell(found)
