"""A run that resumes with another batch size or accumulation: every row of the epoch is
seen, those before the place at most once more; the rows that the model gets tell."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from data_kinds import WIDTH
from tiny import Net, arguments
from torch.utils.data import Dataset, IterableDataset

import ctrainer

N = 22


def row(i: int) -> dict[str, torch.Tensor]:
    x = torch.full((WIDTH,), float(i))
    return {"x": x, "labels": x.sum()}


class Mapped(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return row(i)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(row, range(N))


class Stateful(IterableDataset[Any]):
    """Continues by its own state."""

    at = 0

    def __iter__(self) -> Any:
        while self.at < N:
            self.at += 1
            yield row(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


KINDS = {"map-style": Mapped, "stream": Stream, "stream with a state": Stateful}


def rows_of(
    folder: Path,
    kind: str,
    batch: int,
    accumulation: int,
    steps: int,
    resume: Any = None,
) -> tuple[list[Any], Any]:
    """What the model saw, a number for each row, and the trainer."""
    seen: list[Any] = []
    args = arguments(
        output_dir=str(folder), per_device_train_batch_size=batch, max_steps=steps,
        gradient_accumulation_steps=accumulation, save_steps=1, save_strategy="steps",
        remove_unused_columns=False, logging_steps=100, seed=11,
    )  # fmt: skip
    trainer = ctrainer.Trainer(Net(), args, train_dataset=KINDS[kind]())
    trainer.remove_callback(ctrainer.PrinterCallback)

    def note(module: Any, given: Any, kwargs: Any) -> None:
        seen.extend(kwargs["x"][:, 0].int().tolist())

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train(resume)
    return seen, trainer


@pytest.mark.parametrize("draw", range(12))
def test_no_row_is_left_out(tmp_path: Path, draw: int, caplog: Any) -> None:
    chosen = random.Random(draw)
    kind = chosen.choice(list(KINDS))
    batch, accumulation = chosen.randint(1, 4), chosen.randint(1, 3)
    whole, _ = rows_of(tmp_path / "all", kind, 1, 1, N)
    assert sorted(whole) == list(range(N))
    step = chosen.randint(1, len(whole) // (batch * accumulation))
    before, _ = rows_of(tmp_path / "run", kind, batch, accumulation, step)
    assert before == whole[: len(before)]
    while True:
        new = chosen.randint(1, 4), chosen.randint(1, 3)
        if new != (batch, accumulation):
            break
    saved = str(tmp_path / "run" / f"checkpoint-{step}")
    update = new[0] * new[1]
    again = len(before) % update if new[0] != batch else 0
    at_end = len(before) >= len(whole)
    after, _ = rows_of(tmp_path / "more", kind, *new, step + 1, saved)
    if not at_end:
        start = len(before) - again
        assert after == whole[start : start + update]
    told = f"the last {again} rows before them are trained on again" in caplog.text
    assert told == (again > 0 and not at_end)
