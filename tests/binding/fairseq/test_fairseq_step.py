"""The C half of fairseq's Trainer under plain Python: order of calls and memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctrainer import _C, optim
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq._trainer_step import Step


class Metrics:
    """Counts what is logged; its contexts forget `finally`, as fairseq's do."""

    def __init__(self) -> None:
        self.open = 0

    @contextlib.contextmanager
    def aggregate(self, name: str | None = None) -> Iterator[dict[str, float]]:
        self.open += 1
        yield Meters(loss=1.0, bsz=2.0)
        self.open -= 1

    def log_scalar(self, key: str, *values: Any) -> None: ...

    log_speed = log_start_time = log_stop_time = log_scalar_sum = log_scalar


class Meters(dict[str, float]):
    def get_smoothed_values(self) -> dict[str, float]:
        return dict(self)


class Optimizer:
    in_backward = False

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")

    def all_reduce_grads(self, module: Any) -> None:
        self.calls.append("all_reduce")

    def multiply_grads(self, by: float) -> None:
        self.calls.append("multiply")

    def clip_grad_norm(self, limit: float) -> float:
        self.calls.append("clip")
        return 2.0

    def step(self) -> None:
        self.calls.append("step")


class Task:
    error: Exception | None = None

    def train_step(self, *, sample: Any, optimizer: Any, **more: Any) -> Any:
        optimizer.calls.append(f"sample {sample['n']}")
        if self.error is not None:
            raise self.error
        return None, sample["n"], {"n": sample["n"]}

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        optimizer.step()

    def reduce_metrics(self, outputs: list[Any], criterion: Any) -> None: ...


class Module:
    def train(self) -> None: ...


class Trainer(Step):
    cuda = original_dummies = _criterion_trains = False
    device = torch.device("cpu")
    quantizer = _dummy_batch = _wrapped_model = _wrapped_criterion = None
    data_parallel_world_size = 1

    def __init__(self) -> None:
        self.cfg = SimpleNamespace(optimization=SimpleNamespace(clip_norm=1.0))
        self.calls: list[str] = []
        self.crashes: list[Any] = []
        self.task, self._metrics = Task(), Metrics()
        self._model = self._criterion = Module()
        self._optimizer = Optimizer(self.calls)
        self._lr_scheduler = SimpleNamespace(step_update=lambda n: 0.5)
        self._num_updates = 0
        self._warn_once: set[str] = set()
        self._read_config()

    def _build_part(self, part: str) -> None:
        setattr(self, f"_wrapped_{part}", getattr(self, f"_{part}"))

    def _set_seed(self) -> None:
        self.calls.append(f"seed at {self.get_num_updates()}")

    def _report_failure(
        self, error: BaseException, samples: Any, place: Any, rng: Any, enqueued: bool
    ) -> None:
        assert not enqueued
        self.crashes.append((type(error), samples, place, rng is None))


def test_the_order_of_an_update() -> None:
    trainer = Trainer()
    output = trainer.train_step([{"n": 3}, {"n": 4}])
    assert output == {"loss": 1.0, "sample_size": 7.0}
    assert trainer.calls == [
        "seed at 0", "zero_grad", "sample 3", "sample 4", "all_reduce", "multiply",
        "clip", "step",
    ]  # fmt: skip
    assert trainer._num_updates == 1


class OnGPU(Trainer):
    """What a trainer whose model is on a GPU calls beside."""

    cuda = True

    def _empty_cache(self) -> None:
        self.calls.append(f"empty at {self._num_updates}")


@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_on_a_gpu_samples_are_moved_memory_is_logged_and_the_cache_emptied(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, full = OnGPU(), False

    def moved(sample: Any, *options: Any) -> Any:
        trainer.calls.append("convert")
        return sample

    def memory() -> float:
        trainer.calls.append("memory")
        if full:
            raise MemoryError("it is full")
        return 1.0

    monkeypatch.setattr(tools, "convert_sample", moved)
    monkeypatch.setattr(tools, "memory_gb", memory)
    trainer.cfg.common = SimpleNamespace(empty_cache_freq=every)
    trainer._read_config()
    for _ in range(7):
        assert trainer.train_step([{"n": 3}])["sample_size"] == 3
    assert trainer.calls.count("memory") == trainer.calls.count("convert") == 7
    due = [n for n in range(1, 8) if every and (n + every - 1) % every == 0]
    emptied = [call for call in trainer.calls if call.startswith("empty")]
    assert emptied == [f"empty at {n}" for n in due]
    full = True
    with pytest.raises(MemoryError, match="it is full"):
        trainer.train_step([{"n": 3}])


def test_contexts_that_forget_their_finally_are_left_all_the_same() -> None:
    trainer = Trainer()
    trainer.task.error = KeyError("lost")
    with pytest.raises(KeyError, match="lost"):
        trainer.train_step([{"n": 3}])
    assert trainer._metrics.open == 0
    assert trainer.crashes == [(KeyError, [{"n": 3}], 0, False)]


def test_what_the_crash_report_raises_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Trainer):
        def _report_failure(self, *args: Any) -> None:
            raise OSError("disk full")

    trainer = Broken()
    trainer.task.error = ValueError("the cause")
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with pytest.raises(ValueError, match="the cause"):
        trainer.train_step([{"n": 3}])
    assert [str(report.exc_value) for report in told] == ["disk full"]
    told.clear()


@pytest.mark.parametrize("samples", [[], 3])
def test_no_samples_are_rejected(samples: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Trainer().train_step(samples)


def test_updates_keep_no_memory() -> None:
    trainer = Trainer()
    samples = [{"n": 3}, {"n": 4}]

    def some() -> None:
        trainer.task.error = None
        for _ in range(20):
            trainer.train_step(samples)
        trainer.task.error = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            trainer.train_step(samples)
        trainer.calls.clear()
        trainer.crashes.clear()

    sizes = []
    for _ in range(8):
        some()
        gc.collect()
        sizes.append(sys.getallocatedblocks())
    # An object lost in each update would be 20 blocks.
    assert min(b - a for a, b in itertools.pairwise(sizes)) < 20


def test_survives_every_failed_allocation() -> None:
    testcapi = pytest.importorskip("_testcapi")
    done = False
    for start in range(3000):
        trainer = Trainer()
        trainer._report_failure = lambda *args: None  # type: ignore[method-assign]
        testcapi.set_nomemory(start, start + 1)
        try:
            done = trainer.train_step([{"n": 3}]) is not None
            done = done and trainer._num_updates == 1
        except MemoryError:
            done = False
        finally:
            testcapi.remove_mem_hooks()
        if done and start > 500:
            break
    assert done


def test_the_optimizer_divides_when_it_updates() -> None:
    plain, lazy = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    theirs = torch.optim.SGD([plain], lr=0.5)
    ours = _C.FairseqOptimizer(optim.SGD([lazy], lr=0.5))
    ours.zero_grad()
    ours.backward((lazy * 8).sum())
    ours.multiply_grads(0.25)
    assert torch.equal(lazy.grad, torch.full((3,), 8.0))
    ours.step()
    plain.grad = torch.full((3,), 2.0)
    theirs.step()
    assert torch.equal(plain, lazy)


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_scale_and_closure_of_a_step(kind: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    ours = _C.FairseqOptimizer(kind([parameter], lr=1.0))
    parameter.grad = torch.full((3,), 4.0)
    assert ours.step(lambda: "loss", scale=8.0) == "loss"
    assert torch.equal(parameter, torch.full((3,), 0.5))
    with pytest.raises(ValueError, match="groups is given"):
        ours.step(groups=["a"])
    with pytest.raises(ValueError, match="number > 0"):
        ours.multiply_grads(float("nan"))


def test_an_optimizer_without_its_init_says_so() -> None:
    with pytest.raises(RuntimeError, match="__init__ of this optimizer"):
        _C.FairseqOptimizer.__new__(_C.FairseqOptimizer).zero_grad()
    with pytest.raises(ValueError, match="rules is 'odd'"):
        _C.FairseqOptimizer(object(), rules="odd")
    with pytest.raises(TypeError, match="scaler is a int"):
        _C.FairseqOptimizer(object(), scaler=3)  # type: ignore[arg-type]
