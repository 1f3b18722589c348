"""Copies of sharded modules, and what cannot be copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fsdp_scenarios import adamw, check_parameters, check_same, mse, nested, tree, wrap
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C

OPTIONS: list[dict[str, Any]] = [
    {"compute_dtype": torch.bfloat16},
    {"use_orig_params": True},
    {"flatten_parameters": False, "shard_param_on_dim_0": True, "reduce_bits": 8},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_copy_trains_by_itself_as_its_source_does(options: dict[str, Any]) -> None:
    plain = tree()

    def train(group: _C.Communicator) -> None:
        source = nested(group, copy.deepcopy(plain), **options)
        optimizer = adamw(source)

        def step(model: Any, updates: Any, number: int) -> None:
            mse(model, number, group).backward()
            updates.step()
            updates.zero_grad()

        step(source, optimizer, 0)
        before = {name: p.clone() for name, p in source.full_state_dict().items()}
        made, other = copy.deepcopy((source, optimizer))
        step(source, optimizer, 1)
        for name, value in made.full_state_dict().items():
            assert torch.equal(value, before[name])
        step(made, other, 1)
        names = [name for name, _ in source.named_parameters()]
        assert [name for name, _ in made.named_parameters()] == names
        for mine, theirs in zip(made.parameters(), source.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr() or mine.numel() == 0
        assert made.get_shard_metadata() == source.get_shard_metadata()

    on_ranks(2, train)


def test_tied_parameters_are_tied_in_a_copy() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))
    plain[1].weight = plain[0].weight

    def train(group: _C.Communicator) -> None:
        made = copy.deepcopy(wrap(group, copy.deepcopy(plain)))
        assert made[0].weight is made[1].weight
        check_same(group, made, copy.deepcopy(plain))

    on_ranks(3, lambda group: on_a_copy_inside_a_plain_module(group, plain))
    on_ranks(2, train)


def on_a_copy_inside_a_plain_module(group: _C.Communicator, plain: nn.Module) -> None:
    made = copy.deepcopy(nn.Sequential(wrap(group, copy.deepcopy(plain))))
    check_parameters(made[0], plain)


def test_a_sharded_module_is_not_pickled() -> None:
    sharded = wrap(_C.Communicator(), nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match="a sharded module cannot be pickled: each rank"
    ):
        pickle.dumps(sharded)
