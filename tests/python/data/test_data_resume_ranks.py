"""Two ranks resume in the middle of an epoch with the batches that follow: of shards of
their own, of a stream that both read, or handed out by the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_kinds import Mapped, collate
from ranks import run, told
from tiny import Net, arguments

import ctrainer

SOME = [
    ("map-style", False, 0), ("map-style", False, 2), ("map-style", True, 0),
    ("stream", False, 0), ("stream with a state", True, 0), ("datasets", False, 0),
]  # fmt: skip
EVERY = [
    (kind, dispatch, workers)
    for kind in ("map-style", "stream", "stream with a state", "datasets")
    for dispatch in (True, False)
    for workers in (0, 2)
]


def resume_in_ranks(folder: Path, cases: Any, steps: list[int]) -> list[Any]:
    """Per rank and case what the model saw of each batch: the sum of each row."""
    ranks = told(run(folder, "data.resume", cases=cases, steps=steps))
    for rank in ranks:
        same = rank["same"]
        assert len(same) == len(cases) * len(steps)
        assert {name: s for name, s in same.items() if s != [True, True]} == {}
    return [rank["seen"] for rank in ranks]


def test_two_ranks_resume_with_the_batches_that_follow(tmp_path, caplog) -> None:
    seen = resume_in_ranks(tmp_path, SOME, [5])
    # 5 steps of 2 ranks have seen 20 of the 22 rows.
    saved = str(tmp_path / "0" / "checkpoint-5")

    def alone(rows: int, steps: int = 6) -> Any:
        args = arguments(
            output_dir=str(tmp_path / "alone"), per_device_train_batch_size=rows,
            max_steps=steps, seed=11, remove_unused_columns=False,
        )  # fmt: skip
        trainer = ctrainer.Trainer(Net(), args, collate, Mapped())
        trainer.remove_callback(ctrainer.PrinterCallback)
        return trainer

    found: list[int] = []
    trainer = alone(4)
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(len(kwargs["x"])), with_kwargs=True
    )
    trainer.train(saved)
    assert found == [2]
    again = alone(3)  # from row 18 on, where an update of it begins
    again.model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(len(kwargs["x"])), with_kwargs=True
    )
    again.train(saved)
    assert found == [2, 3]
    assert "the last 2 rows before them are trained on again" in caplog.text
    # Batches are drawn by their number among those of all ranks.
    of_one: list[Any] = []
    trainer = alone(2, steps=10)
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: of_one.append(
            kwargs["x"].double().sum(1).tolist()
        ),
        with_kwargs=True,
    )
    trainer.train()
    in_turns = zip(*(rank[0][:5] for rank in seen), strict=True)
    assert of_one == [batch for step in in_turns for batch in step]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EVERY)
def test_two_ranks_resume_from_every_step(tmp_path: Path, case: Any) -> None:
    resume_in_ranks(tmp_path, [case], [1, 2, 3, 4, 5, 6])
