"""Moments that ranks average, where some of them have made no update of a parameter:
against torch's Adam on each rank, whose state is averaged by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import on_ranks

import ctrainer
from ctrainer import optim

SHAPES = [(3, 2), (4,), (1,)]
NAMES = ("exp_avg", "exp_avg_sq")


def grad(rank: int, update: int, number: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(1000 * rank + 10 * update + number)
    return torch.randn(SHAPES[number], generator=seed)


def parameters() -> list[torch.nn.Parameter]:
    seed = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=seed)) for shape in SHAPES]


def set_grads(params: Any, rank: int, update: int, without: Any) -> None:
    for number, p in enumerate(params):
        missing = (rank, update, number) in without
        p.grad = None if missing else grad(rank, update, number)


def by_hand(world: int, updates: int, every: int, without: Any) -> list[list[Any]]:
    """Each rank's parameters and moments."""
    params = [parameters() for _ in range(world)]
    adams = [torch.optim.Adam(own, lr=0.1, foreach=False) for own in params]
    for update in range(updates):
        for rank in range(world):
            set_grads(params[rank], rank, update, without)
            adams[rank].step()
        if (update + 1) % every:
            continue
        for number in range(len(SHAPES)):
            tensors = [[own[number].data for own in params]]
            states = [adams[r].state[params[r][number]] for r in range(world)]
            if all(states):
                tensors += [[s[name] for s in states] for name in NAMES]
            for of_ranks in tensors:
                mean = torch.stack(of_ranks).double().mean(0)
                for tensor in of_ranks:
                    tensor.copy_(mean)
    return [
        [*own, *(s[name] for p in own if (s := adam.state[p]) for name in NAMES)]
        for own, adam in zip(params, adams, strict=True)
    ]


@settings(max_examples=draws(15, 200), deadline=None)
@given(
    world=st.sampled_from([2, 3]),
    every=st.sampled_from([1, 2, 3]),
    without=st.sets(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), max_size=20
    ),
)
def test_moments_that_all_ranks_have_are_averaged(
    world: int, every: int, without: Any
) -> None:
    updates = 6
    options = {
        "warmup_iterations": 0, "global_sync_iter": every, "block_momentum": 0.0,
        "average_sync": True,
    }  # fmt: skip

    def train(group: Any) -> list[Any]:
        params = parameters()
        inner = optim.Adam(params, lr=0.1)
        made = ctrainer.BMUF(SimpleNamespace(**options), inner, communicator=group)
        for update in range(updates):
            set_grads(params, group.rank, update, without)
            made.step()
        state = inner.state
        kept = [state[p][name] for p in params if p in state for name in NAMES]
        return [*params, *kept]

    expected = by_hand(world, updates, every, without)
    for found, own in zip(on_ranks(world, train, 20.0), expected, strict=True):
        for a, b in zip(found, own, strict=True):
            torch.testing.assert_close(a.data, b.data, rtol=1e-5, atol=1e-6)


def test_the_end_of_a_warm_up_resets_moments_and_no_learning_rate() -> None:
    options = {"warmup_iterations": 2, "global_sync_iter": 4}

    def train(group: Any) -> Any:
        params = parameters()
        inner = optim.Adam(params, lr=0.1)
        made = ctrainer.BMUF(SimpleNamespace(**options), inner, communicator=group)
        found = []
        for update in range(3):
            set_grads(params, group.rank, update, set())
            inner.param_groups[0]["lr"] = 0.1 / (update + 1)
            made.step()
            found.append((inner.param_groups[0]["lr"], len(inner.state)))
        return found

    expected = [(0.1, 3), (0.05, 0), (0.1 / 3, 3)]
    assert on_ranks(2, train, 20.0) == [expected] * 2


def test_schedule_free_optimizers_are_rejected() -> None:
    inner = optim.SGDScheduleFree(parameters(), lr=0.1)
    with pytest.raises(ValueError, match='a "z" of its own on each rank: use another'):
        ctrainer.BMUF({"warmup_iterations": 0}, inner)
