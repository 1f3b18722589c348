"""Handwritten digits without torch: a NumPy network on ctrainer's engine.

The parameters and gradients are arrays and cross to C by their addresses; the loop,
the clipping, AdamW and the learning-rate schedule are C. Run it:

    python examples/digits_numpy.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ctrainer import Trainer, TrainingArguments
from ctrainer.adapters.numpy import Loss, Parameter

Array = np.ndarray[Any, Any]


class MLP:
    """Two layers with a ReLU between them, and their gradients written out."""

    def __init__(self, inputs: int, hidden: int, classes: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed).standard_normal
        self.w1 = Parameter(np.float32(draw((inputs, hidden)) * (2 / inputs) ** 0.5))
        self.b1 = Parameter(np.zeros(hidden, np.float32))
        self.w2 = Parameter(np.float32(draw((hidden, classes)) * (1 / hidden) ** 0.5))
        self.b2 = Parameter(np.zeros(classes, np.float32))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from vars(self).items()

    def parameters(self) -> Iterator[Parameter]:
        yield from vars(self).values()

    def __call__(self, pixels: Array, labels: Array | None = None) -> dict[str, Any]:
        """Logits (batch, classes) and, with labels, the mean cross entropy."""
        hidden = np.maximum(pixels @ self.w1.data + self.b1.data, 0)
        logits = hidden @ self.w2.data + self.b2.data
        if labels is None:
            return {"logits": logits}
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))

        def pull(scale: float) -> None:
            """Add scale times the gradient of the loss to each parameter."""
            slope = np.exp(log_p)
            slope[rows, labels] -= 1
            slope *= scale / len(labels)
            self.w2.accumulate(hidden.T @ slope)
            self.b2.accumulate(slope.sum(axis=0))
            inner = (slope @ self.w2.data.T) * (hidden > 0)
            self.w1.accumulate(pixels.T @ inner)
            self.b1.accumulate(inner.sum(axis=0))

        return {"loss": Loss(-log_p[rows, labels].mean(), pull), "logits": logits}


def examples(pixels: Array, labels: Array) -> list[dict[str, Any]]:
    """A data set: one dict an example, its values named as MLP's arguments."""
    return [{"pixels": p, "label": int(y)} for p, y in zip(pixels, labels, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--output", default="out/digits")
    options = parser.parse_args()

    digits = load_digits()
    pixels = (digits.data / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    model = MLP(inputs=64, hidden=128, classes=10)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            weight_decay=0.01,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=examples(train_x, train_y),
    )
    start = time.perf_counter()
    result = trainer.train()
    seconds = time.perf_counter() - start
    right = model(test_x)["logits"].argmax(axis=1) == test_y
    print(
        f"{result.global_step} updates in {seconds:.1f} s, training loss "
        f"{result.training_loss:.3f}, test accuracy {100 * right.mean():.1f} % of "
        f"{len(test_y)} digits; torch imported: {'torch' in sys.modules}"
    )


if __name__ == "__main__":
    main()
