"""Two ranks resume in the middle of an epoch with the batches that follow: of shards of
their own, of a stream that both read, or handed out by the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_kinds import Mapped, collate
from ranks import run_ranks, told
from tiny import Net, arguments

import ctrainer

WORK = """
from data_kinds import BATCH, DATA, collate
from tiny import Net, arguments
import ctrainer, torch

def make(kind, name, dispatch, workers=0, **options):
    even = kind != "datasets"  # whose shards differ in length
    args = arguments(
        output_dir=f"{folder}/{name}", per_device_train_batch_size=2, max_steps=7,
        save_strategy="steps", save_steps=1, seed=11, remove_unused_columns=False,
        accelerator_config={"dispatch_batches": dispatch, "even_batches": even},
        ddp_timeout=60, dataloader_num_workers=workers, **options)
    trainer = ctrainer.Trainer(Net(dropout=0.2), args, collate, DATA[kind]())
    trainer.remove_callback(ctrainer.PrinterCallback)
    return trainer

def losses(trainer):
    return [e["loss"] for e in trainer.state.log_history if "loss" in e]

def weights(trainer):
    return [float(p.double().sum()) for p in trainer.model.state_dict().values()]

found = {}
for number, (kind, dispatch, workers) in enumerate(CASES):
    whole = make(kind, number, dispatch, workers)
    whole.train()
    for step in STEPS:
        again = make(kind, f"{number}-{step}", dispatch, workers)
        again.args.save_strategy = ctrainer.enums.SaveStrategy.NO
        again.train(f"{folder}/{number}/checkpoint-{step}")
        same = [losses(again) == losses(whole), weights(again) == weights(whole)]
        found[f"{kind}, {dispatch}, {workers}, from {step}"] = same
tell(found)
"""

SOME = [
    ("map-style", False, 2), ("map-style", True, 0), ("stream", False, 0),
    ("stream with a state", True, 0), ("datasets", False, 0),
]  # fmt: skip
EVERY = [
    (kind, dispatch, workers)
    for kind in ("map-style", "stream", "stream with a state", "datasets")
    for dispatch in (True, False)
    for workers in (0, 2)
]


def resume_in_ranks(folder: Path, cases: Any, steps: list[int]) -> None:
    work = f"CASES, STEPS = {cases!r}, {steps!r}\n{WORK}"
    for rank in told(run_ranks(folder, work)):
        assert len(rank) == len(cases) * len(steps)
        assert {name: same for name, same in rank.items() if same != [True, True]} == {}


def test_two_ranks_resume_with_the_batches_that_follow(tmp_path: Path) -> None:
    resume_in_ranks(tmp_path, SOME, [5])
    # 5 steps of 2 ranks have seen 20 of the 22 rows.
    saved = str(tmp_path / "0" / "checkpoint-5")

    def alone(rows: int) -> Any:
        args = arguments(
            output_dir=str(tmp_path / "alone"), per_device_train_batch_size=rows,
            max_steps=6, seed=11, remove_unused_columns=False,
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
    with pytest.raises(ValueError, match="after 20 rows of the epoch"):
        alone(3).train(saved)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EVERY)
def test_two_ranks_resume_from_every_step(tmp_path: Path, case: Any) -> None:
    resume_in_ranks(tmp_path, [case], [1, 2, 3, 4, 5, 6])
