"""fairseq's updates that the host enqueues without waiting for their norm: the runs are
those in which the host measures first, and a norm that is not finite is told of with
the samples that it is of."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import any_gpu
import fairseq_tiny as tiny
import pytest
import ranks
import torch
from draws import draws
from fairseq_enqueued import UPDATES, Criterion, run, trainer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrainer.fairseq import metrics
from ctrainer.fairseq.replay import replay


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


@pytest.fixture(autouse=True)
def empty_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For crash.pt where a test names none."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))


RUNS = st.fixed_dictionaries(
    {
        "optimization__clip_norm": st.sampled_from([0.0, 0.05, 1.0]),
        "optimization__update_freq": st.sampled_from([[1], [2]]),
        "optimizer___name": st.sampled_from(
            ["adam", "sgd", "adamax", "nag", "adadelta", "adagrad", "adafactor"]
        ),
        "lr_scheduler___name": st.sampled_from(
            ["inverse_sqrt", "fixed", "reduce_lr_on_plateau"]
        ),
        "common__bf16": st.booleans(),
        "common__seed": st.integers(1, 3),
    }
)


@settings(max_examples=draws(10, 120), deadline=None)
@given(options=RUNS, looks=st.sets(st.integers(0, UPDATES - 1), max_size=3))
def test_a_run_is_the_one_in_which_the_host_measures_first(
    options: dict[str, Any], looks: set[int]
) -> None:
    if options["optimizer___name"] == "adafactor":
        options = {**options, "optimizer__relative_step": False}
    _, enqueued, waits = run(True, looks, **options)
    _, measured, others = run(False, looks, **options)
    assert enqueued == measured
    # The first update is measured, and one behind a look has no result to wait for.
    assert any_gpu.REAL or (waits[0] > 0 and not any(waits[1:]))
    assert any_gpu.REAL or all(others)


WAITING: list[dict[str, Any]] = [
    {"common__fp16": True},
    {"common__amp": True},
    {"ema__store_ema": True, "ema__ema_decay": 0.5},
    {"optimizer___name": "lamb"},
]


@pytest.mark.parametrize("options", WAITING, ids=str)
def test_what_depends_on_the_norm_waits_for_it(options: dict[str, Any]) -> None:
    _, _, waits = run(True, set(), **options)
    assert any_gpu.REAL or all(waits)


def failing(tmp_path: Path, **changes: Any) -> tuple[Any, list[Any]]:
    """A trainer whose third update was not finite, and the weights before."""
    trainer = trainer_of(True, checkpoint__save_dir=str(tmp_path), **changes)
    first, second, bad = tiny.batches(3)
    trainer.train_step([first])
    trainer.train_step([second])
    weights = [p.detach().cpu().clone() for p in trainer.model.parameters()]
    trainer.train_step([bad | {"factor": torch.tensor(float("nan"))}])
    return trainer, weights


READERS: dict[str, Any] = {
    "the next update": lambda t: t.train_step(tiny.batches(1)),
    "the log": lambda t: metrics.get_smoothed_values("train"),
    "a validation": lambda t: t.valid_step(tiny.batches(1)[0]),
    "a checkpoint": lambda t: t.save_checkpoint("checkpoint.pt", {}),
    "the state": lambda t: t.state_dict(),
    "a load": lambda t: t.load_checkpoint("checkpoint.pt"),
    "a new start": lambda t: t.reinitialize(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_norm_that_is_not_finite_is_told_of_by_the_first_reader(
    tmp_path: Path,
    reader: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, weights = failing(tmp_path, optimization__clip_norm=1.0)
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf") as raised:
        READERS[reader](trainer)
    assert not (tmp_path / "checkpoint.pt").exists()
    notes = "\n".join(raised.value.__notes__)
    assert "first not finite: output[0] of criterion (Criterion)" in notes
    assert "gradients of 3 parameters are not finite: embed.weight" in caplog.text
    assert "update 3 failed" in caplog.text
    assert trainer.get_num_updates() == 2
    for now, before in zip(trainer.model.parameters(), weights, strict=True):
        assert torch.equal(now.cpu(), before)
    verdict = replay(str(tmp_path / "crash.pt"), trainer_of(False))
    assert verdict.startswith("not finite: output[0] of criterion (Criterion)")


def test_training_goes_on_behind_the_error(tmp_path: Path) -> None:
    """The next updates are those of a run in which the host measures first."""
    runs = []
    for enqueues in (True, False):
        trainer = trainer_of(enqueues, checkpoint__save_dir=str(tmp_path))
        batches = tiny.batches(6)
        batches[2] = batches[2] | {"factor": torch.tensor(float("inf"))}
        told = 0
        for batch in batches:
            try:
                trainer.train_step([batch])
                trainer._await_update()
            except FloatingPointError:
                told += 1
        assert told == 1
        assert trainer.get_num_updates() == 5
        runs.append([p.detach().cpu().tolist() for p in trainer.model.parameters()])
    assert runs[0] == runs[1]


class Apart(tiny.Task):
    """Its own way to step."""

    steps = True

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        if self.steps:
            super().optimizer_step(optimizer, model, update_num)


def test_a_task_that_does_not_step_is_measured_all_the_same() -> None:
    task = Apart()
    trainer = tiny.trainer(task=task, criterion=Criterion(), common__cpu=False)
    batches = tiny.batches(4)
    trainer.train_step([batches[0]])
    task.steps = False
    before = [p.detach().cpu().clone() for p in trainer.model.parameters()]
    trainer.train_step([batches[1]])
    for now, old in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(now.cpu(), old)
    assert metrics.get_smoothed_values("train")["gnorm"] > 0
    with pytest.raises(FloatingPointError):
        trainer.train_step([batches[2] | {"factor": torch.tensor(float("nan"))}])


@pytest.mark.parametrize("hook", ["clip_grad_norm", "_check_grad_norms"])
def test_an_override_sees_every_norm(hook: str) -> None:
    trainer = trainer_of(True)
    seen: list[float] = []
    ours = getattr(trainer, hook)

    def override(value: Any) -> Any:
        answer = ours(value)
        seen.append(float(value if answer is None else answer))
        return answer

    setattr(trainer, hook, override)
    for batch in tiny.batches(3):
        trainer.train_step([batch])
    assert len(seen) == 3
    assert all(norm > 0 for norm in seen)


class Swapped(tiny.Trainer):
    """Its optimizer is another one after the passes."""

    def _sum_samples(self, *args: Any, **more: Any) -> Any:
        outputs, size, synced, enqueue = super()._sum_samples(*args, **more)
        if enqueue:
            self._optimizer = SimpleNamespace(
                all_reduce_grads=lambda module: None, multiply_grads=lambda c: None
            )
        return outputs, size, synced, True


def test_an_optimizer_that_is_swapped_within_an_update_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiny, "Trainer", Swapped)
    trainer = trainer_of(True, checkpoint__save_dir=str(tmp_path))
    first, second = tiny.batches(2)
    trainer.train_step([first])
    with pytest.raises(TypeError, match=r"is a types\.SimpleNamespace"):
        trainer.train_step([second])


def test_a_trainer_may_go_before_its_norm_is_read() -> None:
    trainer = trainer_of(True, optimization__clip_norm=0.5)
    for batch in tiny.batches(3):
        trainer.train_step([batch])
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
    assert str(metrics.get_smoothed_values("train")["gnorm"]) in ("nan", "None")


WAITING_RANKS = ("overridden", "others stay", "sharded state")


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
def test_ranks_enqueue_their_updates(tmp_path: Path) -> None:
    """The same runs, whose ranks compare norms an update later and add up their logs
    over NCCL; a rank whose norms an override sees has all ranks wait."""
    told = ranks.told(ranks.run(tmp_path, "fairseq.enqueued_ranks"))
    for found in told:
        for name, (same, waits, others) in found["runs"].items():
            assert same, name
            assert all(others), name
            waiting = waits if name in WAITING_RANKS else waits[:1]
            assert all(waiting), (name, waits)
            assert not any(waits[len(waiting) :]), (name, waits)
        assert "gradients are Nan/Inf" in found["not finite"]
        for name in ("drift", "drift, read"):
            assert "gradients are inconsistent between workers" in found[name]
        assert found["updates"][:2] == [2, 2]


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize(
    ("backend", "enqueues", "from_last"),
    [
        ("pytorch_ddp", True, 1), ("pytorch_ddp", True, 2), ("pytorch_ddp", False, 2),
        ("legacy_ddp", True, 2), ("legacy_ddp", False, 2), ("fully_sharded", False, 1),
        ("fully_sharded", False, 2),
    ],
)  # fmt: skip
def test_no_update_behind_a_failed_collective_is_saved(
    tmp_path: Path, backend: str, enqueues: bool, from_last: int
) -> None:
    """Its weights are wrong, and the streams have continued."""
    for rank in ranks.run(
        tmp_path, "fairseq.broken_behind", backend=backend, enqueues=enqueues,
        from_last=from_last,
    ):  # fmt: skip
        assert rank.code == 0, rank.output
        error, saved = rank.told
        assert "not done, within 2 seconds" in error
        assert saved == []


def left_alone(folder: Path, backend: str, enqueued: bool) -> ranks.Rank:
    program, options = "fairseq.left_on_gpu", {"enqueued": enqueued}
    return ranks.run(folder, program, backend=backend, **options)[0]


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("backend", ["pytorch_ddp", "legacy_ddp"])
def test_a_rank_whose_gpu_waits_for_one_that_died_saves_the_failed_update(
    tmp_path: Path, backend: str
) -> None:
    """Long before the time-out, with the weights of before."""
    first = left_alone(tmp_path, backend, enqueued=False)
    assert first.code == 0, first.output
    error, seconds, same = first.told
    assert "rank 1 (process" in error
    assert seconds < 60
    assert same


@pytest.mark.skipif(any_gpu.REAL, reason="NCCL needs a GPU for each rank")
def test_an_update_in_doubt_is_not_saved(tmp_path: Path) -> None:
    """A rank dies whose GPU has not sent the gradients of an enqueued update."""
    first = left_alone(tmp_path, "pytorch_ddp", enqueued=True)
    assert first.code == 0, first.output
    error, seconds, files = first.told
    assert "the GPU had not done the last update" in error
    assert seconds < 60
    assert files == []
