"""What raises in the middle of a sharded forward or backward, at every place.

On all ranks alike the module is usable afterwards, without loading anything. On one
rank the others are told, and what every rank has can be taken to a new group.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_scenarios import check_parameters, check_same, mse, nested, tree, wrap
from rank_threads import GROUP_SECONDS, LIMIT_SECONDS, on_ranks, seeded
from torch import nn

from ctrainer import _C

WORLD = 2
OPTIONS: list[dict[str, Any]] = [
    {},
    {"flatten_parameters": False, "reshard_after_forward": False},
    {"use_orig_params": True, "disable_reshard_on_root": False},
    {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"},
    {"forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
]


class Broken(Exception):
    """What a test raises, told from anything else."""


# ---- in what is sharded


def raises_in_forward(module: nn.Module) -> Any:
    def hook(*unused: object) -> None:
        raise Broken("forward")

    return module.register_forward_hook(hook)


def raises_before_forward(module: nn.Module) -> Any:
    def hook(*unused: object) -> None:
        raise Broken("before")

    return module.register_forward_pre_hook(hook)


def raises_in_backward(module: nn.Module) -> Any:
    def broken(grad: torch.Tensor) -> None:
        raise Broken("backward")

    def hook(_module: nn.Module, _args: object, out: torch.Tensor) -> None:
        out.register_hook(broken)

    return module.register_forward_hook(hook)


PLACES = (raises_in_forward, raises_before_forward, raises_in_backward)


def trained(group: Any, ranks: Any, **options: Any) -> tuple[Any, nn.Module]:
    """A sharded module, of which ranks have parts, that knows its order of units, and
    the same in one process."""
    plain = tree()
    sharded = nested(ranks, copy.deepcopy(plain), **options)
    check_same(group, sharded, plain, steps=1)
    return sharded, plain


def check_usable(group: Any, sharded: Any, plain: nn.Module) -> None:
    """It is idle, trains as if nothing had been, and holds nothing afterwards."""
    with sharded.no_sync():
        pass
    before = [p.detach().clone() for p in sharded.parameters()]
    sharded.zero_grad()
    check_same(group, sharded, copy.deepcopy(plain), steps=1)
    assert sharded._unit.live_bytes == 0
    with torch.no_grad():
        for p, values in zip(sharded.parameters(), before, strict=True):
            p.copy_(values)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_exception_anywhere_leaves_the_module_usable(
    options: dict[str, Any],
) -> None:
    def train(group: _C.Communicator) -> None:
        sharded, whole = trained(group, group, **options)
        for place in PLACES:
            for module in list(sharded.modules()):
                hook = place(module)
                with pytest.raises(Broken):
                    mse(sharded, 0, group).backward()
                hook.remove()
                check_usable(group, sharded, whole)

    on_ranks(WORLD, train)


def test_an_exception_in_no_sync_drops_what_had_been_accumulated() -> None:
    def train(group: _C.Communicator) -> None:
        sharded, whole = trained(group, group)
        hook = raises_in_backward(sharded[0])
        with sharded.no_sync(), pytest.raises(Broken):
            mse(sharded, 0, group).backward()
        hook.remove()
        check_usable(group, sharded, whole)

    on_ranks(WORLD, train)


# ---- in what the ranks do together


class Backend:
    """A group as a backend in Python whose collective number `fails_at` fails."""

    def __init__(self, group: _C.Communicator) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.made, self.fails_at, self.when = 0, -1, "begin"

    def begin(
        self, what: str, out: Any, in_: Any, dtype: str, op: str, root: int
    ) -> Callable[[], None]:
        self.made += 1
        fails = self.made == self.fails_at
        if fails and self.when == "begin":
            raise Broken(what)
        calls = {
            "all_reduce": lambda: self.group.all_reduce(tensor(in_, dtype), op),
            "all_gather": lambda: self.group.all_gather(
                tensor(out, dtype), tensor(in_, dtype)
            ),
            "reduce_scatter": lambda: self.group.reduce_scatter(
                tensor(out, dtype), tensor(in_, dtype), op
            ),
            "barrier": self.group.barrier,
        }
        return Work(calls[what], what if fails else None)


class Work:
    def __init__(self, call: Callable[[], Any], broken: str | None) -> None:
        self.call, self.broken = call, broken

    def wait(self) -> None:
        self.call()
        if self.broken is not None:
            raise Broken(self.broken)


def tensor(view: memoryview, dtype: str) -> torch.Tensor:
    return torch.frombuffer(view, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("when", ["begin", "wait"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_collective_that_fails_leaves_the_module_usable(
    options: dict[str, Any], when: str
) -> None:
    def train(group: _C.Communicator) -> int:
        backend = Backend(group)
        backend.when = when
        ranks = _C.Communicator(backend)
        sharded, whole = trained(group, ranks, **options)
        before = backend.made
        mse(sharded, 0, group).backward()
        sharded.zero_grad()
        count = backend.made - before
        for number in range(1, count + 1):
            backend.fails_at = backend.made + number
            with pytest.raises(RuntimeError, match=r"on rank \d of 2"):
                mse(sharded, 0, group).backward()
            check_usable(group, sharded, whole)
        return count

    counts = on_ranks(WORLD, train)
    assert counts[0] == counts[1] >= 4


def test_a_failure_at_the_end_of_a_backward_is_told_as_by_the_original(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a unit that waits for the end: one of its parameters gets no gradient."""

    def fail(group: _C.Communicator) -> None:
        backend = Backend(group)
        with seeded(0):
            module = nn.Linear(6, 4)
        module.unused = nn.Parameter(torch.ones(1))
        sharded = wrap(_C.Communicator(backend), module, _debug_msg="of this test")
        loss = mse(sharded, 0, group)
        backend.fails_at = backend.made + 1
        with pytest.raises(RuntimeError, match="reduce_scatter"):
            loss.backward()

    on_ranks(WORLD, fail)
    assert (
        "Exception below occurred in post-backward (_debug_msg: of this test). This is "
        "often due to some inner FSDP modules not being used in an outer FSDP module's "
        "forward pass." in capsys.readouterr().out
    )


# ---- on one rank


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stays", [False, True], ids=["leaves", "stays"])
def test_the_others_are_told_and_go_on_in_a_new_group(
    place: Callable[[nn.Module], Any], stays: bool
) -> None:
    """Rank 1 fails and leaves the group, or stays in it: then rank 0 has to wait."""
    states: list[Any] = [None] * WORLD
    told = threading.Event()

    def fail(group: _C.Communicator) -> str:
        sharded, _ = trained(group, group)
        if group.rank == 1:
            place(sharded[2][0])
        with pytest.raises((Broken, RuntimeError)) as caught:
            mse(sharded, 0, group).backward()
        states[group.rank] = sharded.state_dict()
        if group.rank == 0:
            told.set()
        elif stays:
            assert told.wait(LIMIT_SECONDS)
        return str(caught.value)

    seconds = 4.0 if stays else GROUP_SECONDS
    first, second = on_ranks(WORLD, fail, seconds)
    assert "on rank 0 of 2" in first
    assert ("within 4 s" if stays else "has left the group") in first
    assert second in ("forward", "before", "backward")

    def go_on(group: _C.Communicator) -> None:
        sharded = nested(group, tree())
        sharded.load_state_dict(states[group.rank])
        whole = tree()
        check_same(group, nested(group, tree()), whole, steps=1)
        check_parameters(sharded, whole)
        check_same(group, sharded, whole)

    on_ranks(WORLD, go_on)


class NoMemory:
    @property
    def grad(self) -> None:
        raise MemoryError


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("failing", [{1}, {0, 2}])
def test_a_rank_that_cannot_measure_its_gradients_tells_the_others(
    failing: set[int], norm_type: float
) -> None:
    """They would wait for it in the sum of the norms."""

    def clip(group: _C.Communicator) -> str:
        with seeded(0):
            linear = nn.Linear(3, 3)
        model = wrap(group, linear)
        model(torch.ones(1, 3)).sum().backward()
        before = [shard.grad.clone() for shard in model.sharded_params]
        shards = list(model.sharded_params)
        if group.rank in failing:
            with pytest.raises(MemoryError):
                model._unit.clip([*shards, NoMemory()], 1e-3, norm_type)
            told = ""
        else:
            with pytest.raises(RuntimeError, match=r"(its|their) own error") as e:
                model._unit.clip(shards, 1e-3, norm_type)
            told = str(e.value)
        after = [shard.grad for shard in shards]
        assert all(map(torch.equal, before, after))
        assert model._unit.clip(shards, 1e-3, norm_type) > 1e-3
        return told

    for rank, told in enumerate(on_ranks(3, clip)):
        assert (told == "") == (rank in failing)
        if failing == {1} and told:
            assert told.startswith("rank 1 of 3 failed to measure its gradients")
        elif told and norm_type == 2.0:
            assert told.startswith("2 of 3 ranks failed to measure their gradients")
