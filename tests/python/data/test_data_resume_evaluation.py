"""Evaluations whose rows draw random numbers leave the training alone, and a run that
is resumed before or after one goes on as one that was not interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_kinds import BATCH, Batches, Mapped, Sized, Stateful, Stream, collate
from draws import EXHAUSTIVE
from tiny import Net, arguments
from torch.utils.data import DataLoader

import ctrainer

WORKERS = [(0, False), (2, False), (2, True)]
STEPS = 10  # of 6 batches an epoch; every other one evaluates
KINDS: dict[str, Any] = {"map-style": Mapped, "stream": Stream, "state": Stateful}


class Given(ctrainer.Trainer):
    """Evaluates on a loader of the user's own, where it has one."""

    eval_loader: Any = None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        own = self.eval_loader
        return super().get_eval_dataloader(eval_dataset) if own is None else own


def make(
    folder: Path, kind: str, workers: int, persistent: bool, **options: Any
) -> Given:
    """The workers are those of the evaluations, too."""
    given = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1}
    given |= {"eval_strategy": "steps", "eval_steps": 2, **options}
    args = arguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, seed=11,
        per_device_eval_batch_size=BATCH, remove_unused_columns=False,
        dataloader_num_workers=workers, dataloader_persistent_workers=persistent,
        **given,
    )  # fmt: skip
    data = KINDS.get(kind, Mapped)()
    trainer = Given(Net(dropout=0.2), args, collate, Mapped(), data)
    trainer.remove_callback(ctrainer.PrinterCallback)
    if kind == "object":
        trainer.eval_loader = Batches()
    return trainer


def logged(trainer: Any, name: str) -> list[tuple[int, float]]:
    return [(e["step"], e[name]) for e in trainer.state.log_history if name in e]


def weights(trainer: Any) -> bytes:
    parameters = trainer.model.state_dict().values()
    return b"".join(p.cpu().numpy().tobytes() for p in parameters)


def same(resumed: Any, whole: Any) -> bool:
    return weights(resumed) == weights(whole) and all(
        logged(resumed, name) == logged(whole, name) for name in ("loss", "eval_loss")
    )


CASES = [
    (kind, workers, persistent)
    for number, kind in enumerate([*KINDS, "object"])
    for at, (workers, persistent) in enumerate(WORKERS)
    if kind != "object" or workers == 0
    if EXHAUSTIVE or kind == "map-style" or at == number % 3
]


@pytest.mark.parametrize(("kind", "workers", "persistent"), CASES)
def test_a_run_resumed_around_an_evaluation_equals_one_that_was_not_interrupted(
    tmp_path: Path, kind: str, workers: int, persistent: bool
) -> None:
    whole = make(tmp_path / "whole", kind, workers, persistent)
    whole.train()
    assert [step for step, _ in logged(whole, "eval_loss")] == [2, 4, 6, 8, 10]
    for step in range(1, STEPS) if EXHAUSTIVE else (3, 4):
        torch.manual_seed(step)
        again = make(tmp_path / "b", kind, workers, persistent, save_strategy="no")
        again.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert same(again, whole), step


@pytest.mark.parametrize("by", ["steps", "epoch"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_epochs_end_does_is_done_once(
    tmp_path: Path, kind: str, by: str
) -> None:
    """Whether the checkpoint of its last update was saved before or after it. The loss
    of torch's way to evaluate moves the generators of the order that follows."""
    options = {"eval_strategy": "epoch", "dataloader_seed_by_place": False}
    first = make(tmp_path / "whole", kind, 0, False, save_strategy=by, **options)
    first.train()
    assert [step for step, _ in logged(first, "eval_loss")][:1] == [6]
    for step in (5, 6, 7) if by == "steps" else (6,):
        torch.manual_seed(step)
        again = make(tmp_path / "b", kind, 0, False, save_strategy="no", **options)
        again.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert same(again, first), step


def test_an_epoch_that_training_ends_in_the_middle_is_gone_on_with(
    tmp_path: Path,
) -> None:
    """max_steps ends it, its end saves, and a run of more steps trains on its rest."""
    options = {"eval_strategy": "no", "save_strategy": "epoch"}
    options["lr_scheduler_type"] = "constant"
    whole = make(tmp_path / "whole", "map-style", 0, False, **options)
    whole.train()
    make(tmp_path / "a", "map-style", 0, False, max_steps=8, **options).train()
    again = make(tmp_path / "b", "map-style", 0, False, **options)
    again.train(str(tmp_path / "a" / "checkpoint-8"))
    assert same(again, whole)


def test_evaluations_draw_alike_and_leave_the_training_alone(tmp_path: Path) -> None:
    runs = []
    for workers, persistent in WORKERS:
        run = make(tmp_path, "map-style", workers, persistent, save_strategy="no")
        run.train()
        runs.append(run)
        assert same(run, runs[0])
    assert runs[1].evaluate()["eval_loss"] == runs[1].evaluate()["eval_loss"]
    without = make(tmp_path, "map-style", 0, False, save_strategy="no")
    without.eval_dataset = [{"x": torch.ones(8), "labels": torch.ones(())}]
    without.data_collator = lambda rows: collate(rows) if len(rows) > 1 else batch(rows)
    without.train()
    assert weights(without) == weights(runs[0])


SHARED = [
    (kind, workers, persistent)
    for kind in (Mapped, Stream, Sized, Stateful)
    for workers, persistent in WORKERS
    if EXHAUSTIVE or (kind is Stateful and workers == 0)
]


@pytest.mark.parametrize(("kind", "workers", "persistent"), SHARED)
def test_what_is_trained_on_may_be_evaluated_on(
    tmp_path: Path, kind: Any, workers: int, persistent: bool
) -> None:
    def trainer(shared: bool, **options: Any) -> Given:
        made = make(tmp_path, "map-style", workers, persistent, **options)
        made.train_dataset = kind()
        made.eval_dataset = made.train_dataset if shared else kind()
        return made

    apart = trainer(False, save_strategy="no")
    apart.train()
    shared = trainer(True)
    shared.train()
    assert weights(shared) == weights(apart)
    assert logged(shared, "loss") == logged(apart, "loss")
    for step in range(1, STEPS) if EXHAUSTIVE else (5,):
        again = trainer(True, save_strategy="no")
        again.train(str(tmp_path / f"checkpoint-{step}"))
        assert same(again, shared), step


def test_a_stream_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    run = make(tmp_path, "map-style", 0, False, save_strategy="no")
    run.train_dataset = run.eval_dataset = Stateful()
    run.train_dataset.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"Stateful is trained on and evaluated on"):
        run.train()


def batch(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in rows[0].items()}


def test_torchs_way_draws_from_the_runs_generators(tmp_path: Path) -> None:
    trainer = make(tmp_path, "map-style", 0, False, dataloader_seed_by_place=False)
    assert trainer.evaluate()["eval_loss"] != trainer.evaluate()["eval_loss"]


def test_workers_of_an_evaluation_stay(tmp_path: Path) -> None:
    trainer = make(tmp_path, "map-style", 2, True)
    first = trainer.evaluate()
    loader = trainer.get_eval_dataloader()
    workers = [process.pid for process in loader._iterator._workers]
    assert trainer.evaluate()["eval_loss"] == first["eval_loss"]
    assert [process.pid for process in loader._iterator._workers] == workers


def test_a_loader_may_be_evaluated_in_the_middle_of_its_own_iteration(
    tmp_path: Path,
) -> None:
    trainer = make(tmp_path, "map-style", 0, False)
    trainer.eval_loader = DataLoader(Mapped(), BATCH, collate_fn=collate)
    batches: Iterator[Any] = iter(trainer.eval_loader)
    next(batches)
    trainer.evaluate()
    assert len(list(batches)) == 5
