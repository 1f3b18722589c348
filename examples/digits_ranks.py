"""Handwritten digits on several processes: the same training, its rows shared out.

Every process (rank) trains on its part of each batch, and gradients become averages
while the backward pass runs. The first rank also trains alone, before, on whole
batches, to show what the others bring: the same weights, to a few rounding errors, in
less time where each rank has a core of its own. Run it:

    torchrun --nproc_per_node 2 examples/digits_ranks.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from ctrainer import Trainer, TrainingArguments
from ctrainer.comm import world

BATCH = 256  # rows of an update, over all ranks
# What a launcher tells each rank; without it a process is alone.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


class Reader(nn.Module):
    """Three layers over the 64 pixels of a digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip

    def forward(
        self, pixels: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Logits (batch, 10) and, with labels, the mean cross entropy."""
        logits = self.layers(pixels)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(pixels: Any, labels: Any) -> list[dict[str, torch.Tensor]]:
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    return [{"pixels": x[i], "labels": y[i]} for i in range(len(y))]


def accuracy(given: Any) -> dict[str, float]:
    return {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())}


def train(options: argparse.Namespace, output: str) -> Trainer:
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.data, digits.target, test_size=0.2, random_state=0
    )
    args = TrainingArguments(
        output, num_train_epochs=options.epochs, learning_rate=1e-3, use_cpu=True,
        per_device_train_batch_size=BATCH // world().world_size, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_strategy="no", data_seed=0,
        dataloader_drop_last=True,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(
        Reader(options.width), args, train_dataset=rows(train_x, train_y),
        eval_dataset=rows(test_x, test_y), compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    return trainer


def finish(trainer: Trainer, weights: Path) -> dict[str, float]:
    """What a run came to; its weights go into a file."""
    speeds = [log for log in trainer.state.log_history if "train_runtime" in log]
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), weights)
    return {
        "rows_per_second": speeds[0]["train_samples_per_second"],
        "accuracy": found["eval_accuracy"],
    }


def alone(options: argparse.Namespace, weights: Path) -> dict[str, float]:
    """The same training in one process, started without a launcher's variables."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    told = subprocess.run(
        [sys.executable, __file__, "--alone", str(weights),
         "--epochs", str(options.epochs), "--width", str(options.width)],
        env=environment, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found


def furthest(first: Path, second: Path) -> float:
    """The largest difference between two files' weights."""
    a, b = torch.load(first), torch.load(second)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=float, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--alone", type=Path, help="train in one process, save here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.alone:
            print(json.dumps(finish(train(options, folder), options.alone)))
            return
        group, files = world(), [Path(folder) / name for name in ("one", "all")]
        one = alone(options, files[0]) if group.rank == 0 else {}
        group.barrier()  # nobody trains beside the one that trains alone
        together = finish(train(options, folder), files[1])
        if group.rank == 0:
            report(group.world_size, one, together, furthest(*files))


def report(n: int, one: Any, together: Any, difference: float) -> None:
    for name, found in (("1 rank ", one), (f"{n} ranks", together)):
        print(f"{name}: {found['rows_per_second']:8.0f} rows/s, "
              f"test accuracy {100 * found['accuracy']:.1f} %")  # fmt: skip
    ratio = together["rows_per_second"] / one["rows_per_second"]
    print(f"{ratio:.2f} times as fast; weights differ by {difference:.1e} at most")


if __name__ == "__main__":
    main()
