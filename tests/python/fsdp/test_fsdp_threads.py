"""Sharded models whose forwards and backwards run in threads of their own.

autograd numbers nodes by thread, so what is compared in order to release a unit may be
numbers of several counters. A thread that has just been started begins with 0.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_threads import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

WIDTH, ROWS, WORLD = 6, 4, 2


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What call() returns, run by a thread that has made no node before."""
    found: list[Any] = []
    failed: list[BaseException] = []
    grads = torch.is_grad_enabled()

    def run() -> None:
        try:
            with torch.set_grad_enabled(grads):
                found.append(call())
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def at_once(call: Callable[[], Any]) -> Any:
    return call()


class Inner(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.tanh(self.up(x))
        inner = self.run(lambda: torch.tanh(self.core(up)))
        return torch.tanh(self.down(inner))


class Outer(nn.Module):
    """A unit between frozen layers, two units deep, and one beside it."""

    def __init__(self, recompute: str, frozen: bool, inner: Any, unit: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.beside = Inner(inner), nn.Linear(WIDTH, WIDTH)
        if frozen:
            for module in (self.inner.up, self.inner.down, self.last):
                module.requires_grad_(False)
        self.recompute, self.unit = recompute, unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.recompute == "no":
            inner = self.unit(lambda: self.inner(x))
        else:
            reentrant = self.recompute == "reentrant"
            inner = self.unit(
                lambda: checkpoint(self.inner, x, use_reentrant=reentrant)
            )
        return self.last(torch.tanh(inner) + self.beside(x))


# Who runs the core, the unit around it, the whole forward, and the backward.
THREADS: dict[str, tuple[Any, Any, Any, Any]] = {
    "core": (in_a_thread, at_once, at_once, at_once),
    "unit": (at_once, in_a_thread, at_once, at_once),
    "core and unit": (in_a_thread, in_a_thread, at_once, at_once),
    "forward": (at_once, at_once, in_a_thread, at_once),
    "core and forward": (in_a_thread, at_once, in_a_thread, at_once),
    "backward": (at_once, at_once, at_once, in_a_thread),
    "all": (in_a_thread, in_a_thread, in_a_thread, in_a_thread),
}


def train(model: Any, forward: Any, backward: Any, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for x in batches:
        optimizer.zero_grad()
        # Two graphs, of which each may be another thread's.
        parts = [forward(lambda h=half: model(h)) for half in x.chunk(2)]
        loss = sum(part.square().sum() for part in parts)
        backward(loss.backward)
        optimizer.step()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("recompute", ["no", "plain", "reentrant"])
@pytest.mark.parametrize("threads", THREADS)
def test_threads_change_no_gradient(
    threads: str, recompute: str, frozen: bool, reshard: bool
) -> None:
    inner, unit, forward, backward = THREADS[threads]
    torch.manual_seed(0)
    base = Outer(recompute, frozen, inner, unit)
    batches = [torch.randn(2 * ROWS, WIDTH) for _ in range(2)]
    before = {n: v.clone() for n, v in base.state_dict().items()}
    plain = copy.deepcopy(base)
    train(plain, forward, backward, batches)
    expected = plain.state_dict()
    assert not torch.equal(expected["inner.core.weight"], before["inner.core.weight"])
    assert all(v.isfinite().all() for v in expected.values())

    def work(group: _C.Communicator) -> None:
        def wrap(module: nn.Module) -> Any:
            return FSDP(
                module,
                process_group=group,
                on_neuron=False,
                reshard_after_forward=reshard,
            )

        model: Any = copy.deepcopy(base)
        model.inner.core = wrap(model.inner.core)
        model.inner, model.beside = wrap(model.inner), wrap(model.beside)
        model = wrap(model)
        train(model, forward, backward, batches)
        assert model._unit.live_bytes == 0
        for name, value in model.full_state_dict().items():
            assert torch.allclose(value, expected[name], atol=1e-6), name

    on_ranks(WORLD, work)


class Looks(torch.autograd.Function):
    """Notes in the backward how many of the units are gathered."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, units: list[Any], seen: list[int]
    ) -> torch.Tensor:
        ctx.units, ctx.seen = units, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.append(sum(unit._unit.gathered for unit in ctx.units))
        return grad, None, None


class Row(nn.Module):
    def __init__(self, units: list[Any], recompute: bool, seen: list[int]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.recompute, self.seen = recompute, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=True) if self.recompute else unit(x)
            x = Looks.apply(x, list(self.units), self.seen)
        return x


@pytest.mark.parametrize("recompute", [True, False])
def test_units_of_a_forward_in_another_thread_are_released_as_they_are_done(
    recompute: bool,
) -> None:
    """As on a device, whose backward is a thread's of autograd: a reentrant checkpoint
    makes its nodes there. It is the task that tells of the last one; the next one's
    begins with that one still there."""
    seen: list[int] = []
    layers = [nn.Linear(4, 4) for _ in range(5)]

    def work(group: _C.Communicator) -> None:
        wrap = lambda module: FSDP(module, process_group=group, on_neuron=False)  # noqa: E731
        model = wrap(Row([wrap(layer) for layer in layers], recompute, seen))
        x = torch.ones(2, 4, requires_grad=True)
        in_a_thread(lambda: model(x * 2)).sum().backward()

    on_ranks(1, work)
    assert len(seen) == 5
    assert max(seen) <= (1 if recompute else 0)


def test_two_models_train_in_two_threads_at_a_time() -> None:
    torch.manual_seed(0)
    bases = [Outer("no", frozen, at_once, at_once) for frozen in (True, False)]
    batches = [torch.randn(2 * ROWS, WIDTH) for _ in range(6)]
    expected = []
    for base in bases:
        plain = copy.deepcopy(base)
        train(plain, at_once, at_once, batches)
        expected.append(plain.state_dict())
        assert all(v.isfinite().all() for v in expected[-1].values())

    def work(number: int, group: _C.Communicator) -> None:
        wrap = lambda module: FSDP(module, process_group=group, on_neuron=False)  # noqa: E731
        model: Any = copy.deepcopy(bases[number])
        model.inner, model.beside = wrap(model.inner), wrap(model.beside)
        model = wrap(model)
        train(model, at_once, at_once, batches)
        for name, value in model.full_state_dict().items():
            assert torch.allclose(value, expected[number][name], atol=1e-6), name

    def both(group: _C.Communicator) -> None:
        other = group.split(0, group.rank)
        thread = threading.Thread(target=run, args=(0, other))
        thread.start()
        run(1, group)
        thread.join()
        other.close()

    failed: list[BaseException] = []

    def run(number: int, group: _C.Communicator) -> None:
        try:
            work(number, group)
        except BaseException as e:
            failed.append(e)

    on_ranks(WORLD, both)
    assert not failed
