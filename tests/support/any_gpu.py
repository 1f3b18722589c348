"""The GPU of tests/device: the emulated one, or a real one for CTRAINER_TEST_GPU=1."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import emulated_torch
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import ctrainer
from ctrainer import _C
from ctrainer.comm import nccl

REAL = os.environ.get("CTRAINER_TEST_GPU") == "1"
KIND = "cuda" if REAL else "emul"
# The emulated device computes a model's passes as the host does. A GPU adds in another
# order, in bf16 and fp16 with other roundings, and of a gradient near 0 each of Adam's
# updates of 1e-2 may then have the other sign.
LIMIT = 2e-2 if REAL else 0.0
DROPOUT = 0.0 if REAL else 0.2  # torch draws otherwise on a GPU


def device() -> torch.device:
    return torch.device("cuda", 0) if REAL else emulated_torch.device()


def allocations() -> int:
    """How often the plugin has taken memory so far."""
    if REAL:
        pytest.skip("a GPU's driver does not count allocations")
    return emulated_torch.allocations()


def waits() -> int:
    """How often the host has waited for the device so far; 0 on a real one."""
    return 0 if REAL else emulated_torch.waits()


def assert_same(found: torch.Tensor, expected: torch.Tensor, close: float = 0) -> None:
    """What a run on the GPU has come to is what one on the host has: to `close`, on a
    real GPU to LIMIT at least."""
    limit = max(close, LIMIT)
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=limit, atol=limit)


class Graph:
    """A graph of the current stream's work: captured() is a context."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph() if REAL else emulated_torch.Graph()

    def captured(self) -> Any:
        return torch.cuda.graph(self._graph) if REAL else self._graph.captured()

    def replay(self) -> None:
        self._graph.replay()


RANKS = 2
OURS, TORCHS = (os.path.dirname(str(m.__file__)) + os.sep for m in (ctrainer, torch))


COMPARISONS = (torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose)


class TestsMakeTensorsOn(TorchFunctionMode):
    """Within it a test's torch.randn() and the like are on the device, and have the
    values that they have on the host. ctrainer's stay where it wants them. What a test
    compares may be anywhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._makers = _device_constructors()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        makes = func in self._makers and kwargs.get("device") is None
        if not makes and func not in COMPARISONS:
            return func(*args, **kwargs)
        caller = sys._getframe(1)
        while caller.f_code.co_filename.startswith(TORCHS) and caller.f_back:
            caller = caller.f_back
        if caller.f_code.co_filename.startswith(OURS):
            return func(*args, **kwargs)
        if not makes:
            return func(*(of.cpu() for of in args), **kwargs)
        trains = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            made = made.to(self._device).requires_grad_(trains)
        return made


def on_nccl_ranks(
    work: Callable[[_C.Communicator, torch.device], Any],
    ranks: int = RANKS,
    seconds: float = 60.0,
) -> list[Any]:
    """What the work of each rank returns: a thread and an emulated GPU each, in a group
    of NCCL on a stream beside torch's."""
    device()
    cuda = nccl.plugin()
    id = cuda.comm_id()
    gc.collect()  # a rank that frees memory of an earlier one would wait

    def be_rank(rank: int) -> Any:
        gpu = torch.device("emul", rank)
        torch.accelerator.set_device_index(gpu)
        beside = torch.Stream(gpu).stream_id
        group = _C.plugin_communicator(cuda.plugin, id, rank, ranks, beside, seconds)
        try:
            return work(group, gpu)
        finally:
            group.close()

    with ThreadPoolExecutor(ranks) as pool:
        begun = [pool.submit(be_rank, rank) for rank in range(ranks)]
        return [done.result(120) for done in begun]
