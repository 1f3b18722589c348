"""A run resumed at any step has the batches, and so the losses, of one that was not
interrupted: bit for bit, for every kind of data and any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_kinds import BATCH, DATA, LOADERS, collate, loader_of
from draws import draws
from tiny import Net, arguments

import ctrainer

WORKERS = [(0, False), (2, False), (2, True)]
STEPS = 14  # of 6 batches an epoch


class Given(ctrainer.Trainer):
    """Trains on a loader of the user's own, where it has one."""

    own_loader: Any = None

    def get_train_dataloader(self) -> Any:
        own = self.own_loader
        return super().get_train_dataloader() if own is None else own


def make(
    folder: Path, kind: str, workers: int, persistent: bool, **options: Any
) -> Given:
    name, data = LOADERS.get(kind, ("", DATA.get(kind)))
    assert data is not None
    dataset = data()
    given = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, **options}
    args = arguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, seed=11,
        remove_unused_columns=False, dataloader_num_workers=workers,
        dataloader_persistent_workers=persistent, **given,
    )  # fmt: skip
    trainer = Given(Net(dropout=0.2), args, collate, dataset)
    trainer.remove_callback(ctrainer.PrinterCallback)
    if name:
        trainer.own_loader = loader_of(name, dataset, workers, persistent)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [e["loss"] for e in trainer.state.log_history if "loss" in e]


def weights(trainer: Any) -> bytes:
    parameters = trainer.model.state_dict().values()
    return b"".join(p.numpy().tobytes() for p in parameters)


def check(folder: Path, steps: Any, **given: Any) -> Any:
    """Train, then resume from each of these steps, and compare."""
    whole = make(folder / "whole", **given)
    whole.train()
    assert len(losses(whole)) == STEPS
    for step in steps:
        torch.manual_seed(step)
        resumed = make(folder / "again", **{**given, "save_strategy": "no"})
        resumed.train(str(folder / "whole" / f"checkpoint-{step}"))
        assert losses(resumed) == losses(whole), step
        assert weights(resumed) == weights(whole), step
    return whole


CASES = [
    (kind, workers, persistent)
    for kind in [*DATA, *LOADERS]
    for workers, persistent in WORKERS
    if kind != "object" or workers == 0
]


@pytest.mark.parametrize(("kind", "workers", "persistent"), CASES)
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    tmp_path: Path, kind: str, workers: int, persistent: bool
) -> None:
    some = draws(2 if workers == 0 else 1, STEPS - 1)
    steps = [*range(1, STEPS)][:: (STEPS - 1) // some][:some]
    if some < STEPS - 1:
        steps = [3 + sum(map(ord, kind)) % 3, 9][:some]
    check(tmp_path, steps, kind=kind, workers=workers, persistent=persistent)
