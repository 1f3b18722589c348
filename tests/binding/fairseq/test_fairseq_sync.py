"""What ranks exchange in fairseq's Trainer, with another rank that is like this one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctrainer import _C
from ctrainer.fairseq._trainer_step import Step


class Pending:
    def wait(self) -> None: ...


class Twin:
    """The other of two ranks gives what this one gives, times `factor`."""

    rank, world_size = 0, 2

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.calls: list[str] = []

    def begin(
        self, what: str, out: memoryview, in_: memoryview, dtype: str, op: str,
        root: int,
    ) -> Pending:  # fmt: skip
        self.calls.append(what)
        values = np.frombuffer(in_, dtype)
        if what == "all_reduce":
            values *= 1 + self.factor
        else:
            np.frombuffer(out, dtype)[:] = [*values, *(values * self.factor)]
        return Pending()


class Task:
    summed = True

    @classmethod
    def logging_outputs_can_be_summed(cls, criterion: Any) -> bool:
        return cls.summed


class Trainer(Step):
    cuda = original_dummies = _criterion_trains = False
    _criterion = _metrics = None
    _communicator = None
    data_parallel_world_size = 2

    def __init__(self, twin: Twin, amp: bool = False) -> None:
        self.cfg = SimpleNamespace(common=SimpleNamespace(amp=amp))
        self.task = Task()
        self.twin = twin
        self._communicator = _C.Communicator(twin)
        self._read_config()

    def _gather_logs(self, logs: list[Any] | None) -> list[Any]:
        return [*(logs or []), "the other's"]


def test_logs_and_numbers_are_summed_in_one_collective() -> None:
    twin = Twin(factor=1.0)
    trainer = Trainer(twin)
    logs = [{"loss": 1.5, "n": 2}, {"n": 3, "loss": np.float64(2.0)}, {"n": 1}]
    summed, extras = trainer._fast_stat_sync_sum(logs, 4, 0.5)
    assert summed == [{"loss": 7.0, "n": 12.0}]
    assert extras == (8.0, 1.0)
    assert twin.calls == ["all_reduce"]


def test_ignored_logs_count_as_zeros() -> None:
    trainer = Trainer(Twin())
    summed, extras = trainer._fast_stat_sync_sum([{"loss": 9.0}], 4, ignore=True)
    assert summed == [{"loss": 0.0}]
    assert extras == (8.0,)


def test_ranks_with_other_keys_exchange_the_logs() -> None:
    # the other rank's hash of its keys is another
    trainer = Trainer(Twin(factor=3.0))
    assert trainer._fast_stat_sync_sum([{"a": 1}], 2) == ([{"a": 1}, "the other's"],
                                                          (8.0,))  # fmt: skip


def test_a_rank_without_logs_gets_those_of_the_others() -> None:
    assert Trainer(Twin())._fast_stat_sync_sum([], 2) == (["the other's"], (4.0,))


def test_the_task_says_whether_logs_can_be_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(Twin())
    assert trainer._aggregate_logging_outputs([{"n": 1}], 2)[0] == [{"n": 2.0}]
    monkeypatch.setattr(Task, "summed", False)
    logs, extras = trainer._aggregate_logging_outputs([{"n": 1}], 2)
    assert logs == [{"n": 1}, "the other's"]
    assert extras == (4.0,)
    logs, _ = trainer._aggregate_logging_outputs([{"n": 1}], 2, ignore=True)
    assert logs == ["the other's"]


def test_wrong_arguments_are_rejected() -> None:
    trainer = Trainer(Twin())
    with pytest.raises(TypeError, match="must be real number"):
        trainer._communicator.sum_numbers(None, [1.0, "2"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="cannot sum 70 numbers"):
        trainer._fast_stat_sync_sum([], *range(70))
    with pytest.raises(TypeError, match="logs a list as 'n'"):
        trainer._fast_stat_sync_sum([{"n": [1]}])
    with pytest.raises(TypeError):
        trainer._fast_stat_sync_sum([{1: 1.0}])


@pytest.mark.parametrize(
    ("norm", "factor", "amp", "raises"),
    [
        (1.0, 1.0, False, False),
        (1.0, 1.0 + 1e-7, False, False),
        (1.0, 1.0 + 1e-5, False, True),
        (1e-13, 2.0, False, False),  # 1e-6 is added to the first norm
        (float("inf"), 1.0, False, False),  # on all ranks: told of otherwise
        (float("nan"), 1.0, False, False),
        (1.0, float("nan"), False, True),
        (1.0, float("inf"), True, False),
        (1.0, 2.0, True, True),
    ],
)
def test_norms_have_to_agree(
    norm: float, factor: float, amp: bool, raises: bool
) -> None:
    trainer = Trainer(Twin(factor), amp)
    if not raises:
        trainer._check_grad_norms(norm)
        return
    with pytest.raises(FloatingPointError, match="rank   1 = "):
        trainer._check_grad_norms(norm)


def test_survives_every_failed_allocation() -> None:
    testcapi = pytest.importorskip("_testcapi")
    trainer = Trainer(Twin())

    def use() -> bool:
        made = trainer._communicator.sum_numbers("a step", [1.0, 0.5])
        return made == [2.0, 1.0]

    assert use()  # NumPy has then made what it makes once
    for start in range(500):
        testcapi.set_nomemory(start, start + 1)
        try:
            done = use()
        except MemoryError:
            done = False
        finally:
            testcapi.remove_mem_hooks()
        if done and start > 100:
            break
    assert done
