"""Stochastic rounding of sharded bfloat16 parameters: the random bits of an element do
not depend on the ranks among which its parameter is sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C, optim
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

SIZES = [(7, 5), (3,), (11, 13), (600,), (1,)]  # parts begin at any element
FLAT = {"flatten_parameters": True, "on_neuron": False}
KINDS = {
    "each": {"on_neuron": False, "_shard_size_multiple": 1},
    "rows": {"on_neuron": False, "shard_param_on_dim_0": True},
    "flat": FLAT | {"_shard_size_multiple": 3},
    "views": FLAT | {"use_orig_params": True, "_shard_size_multiple": 3},
}


class Parameters(nn.Module):
    """Some have no gradient, and have their random bits all the same."""

    def __init__(self) -> None:
        super().__init__()
        for i, size in enumerate(SIZES):
            value = torch.randn(*size).bfloat16()
            self.register_parameter(f"p{i}", nn.Parameter(value))

    def forward(self, unused: int) -> torch.Tensor:
        terms = [
            (p.float() * torch.arange(p.numel()).view(p.shape).cos()).sum()
            for i, p in enumerate(self.tensors())
            if i != unused
        ]
        return torch.stack(terms).sum()

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, f"p{i}") for i in range(len(SIZES))]


def train(model: Any, params: Any, updates: int = 3) -> None:
    optimizer = optim.AdamW(params, lr=1e-4, stochastic_rounding=True)
    for update in range(updates):
        optimizer.zero_grad()
        model(update).backward()
        optimizer.step()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["each", "rows", "views"])
def test_shards_are_rounded_as_whole_parameters(kind: str, world: int) -> None:
    with seeded(0):
        plain = Parameters()
    copies = [copy.deepcopy(plain) for _ in range(world)]
    before = copy.deepcopy(plain.state_dict())
    train(plain, plain.parameters())
    expected = plain.state_dict()
    assert all(not torch.equal(expected[name], before[name]) for name in ("p2", "p3"))

    def work(group: _C.Communicator) -> None:
        model = FSDP(copies[group.rank], process_group=group, **KINDS[kind])
        train(model, model.parameters())
        for name, value in model.full_state_dict().items():
            assert torch.equal(value, expected[name]), name

    on_ranks(world, work)


def test_a_flat_parameter_is_rounded_alike_on_any_number_of_ranks() -> None:
    found = []
    for world in (1, 2, 3):
        with seeded(0):
            made = Parameters()
        copies = [copy.deepcopy(made) for _ in range(world)]

        def work(group: _C.Communicator, copies: Any = copies) -> Any:
            model = FSDP(copies[group.rank], process_group=group, **KINDS["flat"])
            train(model, model.parameters())
            return model.full_state_dict()

        found.append(on_ranks(world, work)[0])
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
