"""Groups over NCCL from Python: the plugin over the emulation; ranks are threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import emulated_cuda
import numpy as np
import pytest
from rank_threads import on_ranks

import ctrainer
from ctrainer import _C
from ctrainer.comm import nccl

RANKS = 2


@pytest.fixture(scope="module")
def cuda() -> Any:
    return emulated_cuda.load()


def on_every_rank(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, work: Callable[[_C.Communicator], Any]
) -> list[Any]:
    monkeypatch.setattr(nccl, "plugin", lambda: cuda)

    def be_rank(over: _C.Communicator) -> Any:
        emulated_cuda.be_host(over.rank)
        group = nccl.communicator(over, 30.0, stream=0)
        try:
            return work(group)
        finally:
            group.close()

    return on_ranks(RANKS, be_rank)


def test_collectives_on_host_memory_are_copied_to_the_device(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: _C.Communicator) -> list[Any]:
        values = np.arange(3, dtype=np.float32) + group.rank
        group.all_reduce(values, "mean")
        out = np.zeros(4, np.int64)
        group.all_gather(out, np.array([group.rank, 7]))
        part = np.zeros(1, np.float32)
        group.reduce_scatter(part, np.array([1, 2], np.float32))
        turned = np.zeros(2, np.float32)
        group.all_to_all(turned, np.array([0, 1], np.float32) + 10 * group.rank)
        high = np.array([group.rank, 5], np.float32)
        group.reduce(high, 1, "max")
        assert group.rank == 0 or high.tolist() == [1, 5]
        group.barrier()
        begun = group.all_reduce(part, async_op=True)
        assert begun is not None
        begun.wait()
        said = group.gather_bytes(b"x" * group.rank)
        other = group.split(ranks=[1, 0])
        assert other is not None
        return [
            *(group.backend, group.rank, values.tolist(), out.tolist(), part.tolist()),
            *(turned.tolist(), said, other.backend, other.rank),
        ]

    told = on_every_rank(cuda, monkeypatch, work)
    means, gathered = [0.5, 1.5, 2.5], [0, 7, 1, 7]
    for rank in range(RANKS):
        turned = [[0.0, 10.0], [1.0, 11.0]][rank]
        assert told[rank] == [
            *("nccl", rank, means, gathered, [6.0], turned, [b"", b"x"]),
            *("nccl", 1 - rank),
        ]


def test_operands_that_do_not_fit_are_rejected_on_every_rank(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: _C.Communicator) -> str:
        with pytest.raises(ValueError, match="NCCL has no int16"):
            group.all_reduce(np.zeros(1, np.int16))
        with pytest.raises(ValueError, match="all_gather over 2 ranks needs 2 times"):
            group.all_gather(np.zeros(3), np.zeros(1))
        return group.backend

    assert on_every_rank(cuda, monkeypatch, work) == ["nccl", "nccl"]


def test_the_versions_are_those_of_what_is_found(cuda: Any) -> None:
    assert cuda.versions() == {
        "runtime": "13.0", "driver": "13.0", "cublas": "13.1", "nccl": "2.29",
    }  # fmt: skip


def test_arguments_out_of_range_are_named(cuda: Any) -> None:
    id = cuda.comm_id()
    with pytest.raises(ValueError, match="rank must be in"):
        _C.plugin_communicator(cuda.plugin, id, 2, 2, 0, 1.0)
    with pytest.raises(ValueError, match="timeout_seconds must be above 0"):
        _C.plugin_communicator(cuda.plugin, id, 0, 1, 0, float("nan"))
    with pytest.raises(ValueError, match="id must have 128 bytes, got 3"):
        _C.plugin_communicator(cuda.plugin, b"abc", 0, 1, 0, 1.0)
    with pytest.raises(ValueError, match="PyCapsule"):
        _C.plugin_communicator(None, id, 0, 1, 0, 1.0)


def test_without_a_plugin_or_a_gpu_it_is_said_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = _C.Communicator()
    monkeypatch.setitem(sys.modules, "ctrainer._cuda", None)
    monkeypatch.delattr(ctrainer, "_cuda", raising=False)
    with pytest.raises(RuntimeError, match="needs ctrainer's CUDA plugin"):
        nccl.communicator(group)


def test_without_a_gpu_the_reason_is_told(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plugin:
        @staticmethod
        def why_no_device() -> str:
            return "no NVIDIA driver is installed"

    import ctrainer

    monkeypatch.setitem(sys.modules, "ctrainer._cuda", Plugin)
    monkeypatch.setattr(ctrainer, "_cuda", Plugin, raising=False)
    with pytest.raises(RuntimeError, match="has none: no NVIDIA driver is installed"):
        nccl.communicator(_C.Communicator())
