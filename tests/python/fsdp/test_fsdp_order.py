"""Ranks that come to different units are told which, where collectives are compared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fsdp_scenarios import check_same, nested, tree, wrap
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C


class Swapped(nn.Module):
    """Two units of one size, in an order that each rank may choose."""

    def __init__(self, group: Any, order: list[int]) -> None:
        super().__init__()
        with seeded(0):
            linear = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            wrap(group, copy.deepcopy(linear)) for _ in range(2)
        )
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def run(group: _C.Communicator, order: list[int]) -> None:
    model = wrap(group, Swapped(group, order))
    model(torch.ones(1, 4)).sum().backward()


def test_different_orders_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTRAINER_CHECK_COLLECTIVES", "1")

    def use(group: _C.Communicator) -> str:
        run(group, [0, 1])
        with pytest.raises(ValueError, match="different orders") as caught:
            run(group, [0, 1] if group.rank == 0 else [1, 0])
        return str(caught.value)

    text = (
        "ranks use different units, or in different orders: rank 0 gathers 'blocks.0',"
        " rank 1 gathers 'blocks.1'. All ranks have to call the same modules in the "
        "same order"
    )
    assert on_ranks(2, use) == [text] * 2


def test_a_unit_that_one_rank_leaves_out_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CTRAINER_CHECK_COLLECTIVES", "1")

    def use(group: _C.Communicator) -> str:
        with pytest.raises(ValueError, match="different units") as caught:
            run(group, [0, 1] if group.rank == 0 else [0])
        return str(caught.value)

    for told in on_ranks(2, use):
        assert "rank 0 gathers 'blocks.1', rank 1 gathers 'blocks.0'" in told


def test_the_same_order_trains_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTRAINER_CHECK_COLLECTIVES", "1")
    plain = tree()

    def train(group: _C.Communicator) -> None:
        check_same(group, nested(group, copy.deepcopy(plain)), copy.deepcopy(plain))

    on_ranks(2, train)
