"""use_orig_params: parameters() has a view of the shard for each parameter."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_scenarios import check_parameters, check_same, mse, nested, tree, wrap
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C, optim
from ctrainer.fsdp import (
    FullyShardedDataParallel,
    consolidate_sharded_model_checkpoints,
    load_shard,
    reshard_checkpoints,
    save_shard,
)

LAYOUTS: list[dict[str, Any]] = [
    {"_shard_size_multiple": 1},
    {},
    {"flatten_parameters": False},
    {"flatten_parameters": False, "shard_param_on_dim_0": True},
]


def without_decay_of_biases(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith("bias")]},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 3])
def test_groups_of_parameters_have_options_of_their_own(
    layout: dict[str, Any], world: int
) -> None:
    plain = tree()

    def train(group: _C.Communicator) -> None:
        whole = copy.deepcopy(plain)
        sharded = nested(group, copy.deepcopy(plain), use_orig_params=True, **layout)
        assert [n for n, _ in sharded.named_parameters()] == [
            n for n, _ in whole.named_parameters()
        ]
        for model in (sharded, whole):
            optimizer = optim.AdamW(
                without_decay_of_biases(model), lr=1e-2, eps=1e-3, weight_decay=0.5
            )
            for step in range(4):  # all ranks have all of the batch
                mse(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        check_parameters(sharded, whole)

    on_ranks(world, train)


def test_views_train_clip_and_accumulate_like_one_process() -> None:
    plain = tree()

    def train(group: _C.Communicator) -> None:
        sharded = nested(group, copy.deepcopy(plain), use_orig_params=True)
        whole = copy.deepcopy(plain)
        check_same(group, sharded, whole)
        for step in (0, 1):  # the second adds to what is there
            mse(sharded, step, group).backward()
            mse(whole, step).backward()
            for view in sharded.parameters():
                view.grad = view.grad * 1.0  # a tensor of its own
        norm = sharded.clip_grad_norm_(1e9)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
        assert abs(norm - expected) < 2e-6

    on_ranks(2, train)


def test_views_divide_what_the_ranks_have() -> None:
    plain = tree()

    def shapes(group: _C.Communicator) -> dict[str, tuple[int, ...]]:
        options = {"use_orig_params": True, "_shard_size_multiple": 1}
        sharded = nested(group, copy.deepcopy(plain), **options)
        mse(sharded, 0, group).backward()
        return {n: tuple(p.grad.shape) for n, p in sharded.named_parameters()}

    mine, theirs = on_ranks(2, shapes)
    for name, param in plain.named_parameters():
        assert mine[name][0] + theirs[name][0] == param.numel()
    assert (0,) in mine.values()


def test_rows_keep_their_shape() -> None:
    plain = nn.Linear(2, 3, bias=False)

    def shapes(group: _C.Communicator) -> list[tuple[int, ...]]:
        sharded = wrap(
            group,
            copy.deepcopy(plain),
            use_orig_params=True,
            flatten_parameters=False,
            shard_param_on_dim_0=True,
        )
        return [tuple(p.shape) for p in sharded.parameters()]

    assert on_ranks(4, shapes) == [[(1, 2)]] * 3 + [[(0, 2)]]


def test_checkpoints_have_the_shards() -> None:
    plain, other = tree(), tree(1)

    def load(group: _C.Communicator) -> None:
        flat = nested(group, copy.deepcopy(plain))
        viewed = nested(group, copy.deepcopy(plain), use_orig_params=True)
        source = nested(group, copy.deepcopy(other))
        assert list(viewed.state_dict()) == list(flat.state_dict())
        assert viewed.get_shard_metadata() == flat.get_shard_metadata()
        names = [n for n, _ in viewed.named_parameters()]
        optimizer = torch.optim.SGD(viewed.parameters(), lr=0.1)
        for assign in (False, True):
            viewed.load_state_dict(source.state_dict(), assign=assign)
            assert [n for n, _ in viewed.named_parameters()] == names
            check_parameters(viewed, other)
        with pytest.raises(RuntimeError, match="Missing key"):
            viewed.load_state_dict({})
        assert [n for n, _ in viewed.named_parameters()] == names
        # The optimizer's views are those of the shards that were assigned.
        expected = copy.deepcopy(other)
        mse(viewed, 0, group).backward()
        mse(expected, 0).backward()
        optimizer.step()
        torch.optim.SGD(expected.parameters(), lr=0.1).step()
        check_parameters(viewed, expected)

    on_ranks(2, load)


def test_a_child_of_a_plain_module_saves_shards() -> None:
    alone = _C.Communicator()
    body = nn.Sequential(wrap(alone, nn.Linear(2, 2), use_orig_params=True))
    state = body.state_dict()
    assert all("_fsdp_shard" in key for key in state)
    state = {key: torch.ones_like(value) for key, value in state.items()}
    body.load_state_dict(state)
    assert all(torch.equal(p, torch.ones_like(p)) for p in body.parameters())
    assert [n for n, _ in body[0].named_parameters()] == ["weight", "bias"]


def test_tied_and_frozen_parameters_have_one_view() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)
            self.b.weight = self.a.weight
            self.c = nn.Linear(6, 4).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.c(self.b(self.a(x)))
            return out

    torch.manual_seed(0)
    plain = Tied()

    def train(group: _C.Communicator) -> None:
        sharded = wrap(group, copy.deepcopy(plain), use_orig_params=True)
        named = dict(sharded.named_parameters())
        assert list(named) == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]
        assert not named["c.weight"].requires_grad
        check_same(group, sharded, copy.deepcopy(plain))

    on_ranks(2, train)


def test_optimizers_that_look_at_whole_parameters_reject_flat_ones() -> None:
    plain = nn.Linear(6, 4)

    def step(group: _C.Communicator) -> None:
        sharded = wrap(group, copy.deepcopy(plain))
        mse(sharded, 0, group).backward()
        for kind in (optim.LAMB, optim.LARS, optim.Adafactor):
            optimizer = kind(sharded.parameters())
            name = kind.__name__.lower()
            message = f"is a flat parameter, several .* and {name} looks at each"
            for _ in range(2):  # asked anew after a rejection
                with pytest.raises(ValueError, match=message):
                    optimizer.step()
        with pytest.raises(ValueError, match="Muon is for matrices"):
            optim.Muon(sharded.parameters())

    on_ranks(2, step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_optimizers_state_of_views_goes_through_files_to_other_ranks(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    def made(group: _C.Communicator) -> tuple[Any, Any]:
        sharded = nested(group, tree(), use_orig_params=True, **layout)
        groups = without_decay_of_biases(sharded)
        return sharded, optim.AdamW(groups, lr=1e-2, weight_decay=0.5)

    def save(group: _C.Communicator) -> Any:
        sharded, optimizer = made(group)
        for step in range(2):
            mse(sharded, step, group).backward()
            optimizer.step()
        state = FullyShardedDataParallel.sharded_optim_state_dict(sharded, optimizer)
        content = {"model": sharded.state_dict(), "optimizer": state,
                   "shard_metadata": sharded.get_shard_metadata()}  # fmt: skip
        save_shard(content, tmp_path / f"three-{group.rank}.safetensors")
        return FullyShardedDataParallel.optim_state_dict(sharded, optimizer)

    def load(group: _C.Communicator) -> Any:
        sharded, optimizer = made(group)
        content = load_shard(paths[group.rank])
        sharded.load_state_dict(content["model"])
        for own in content["optimizer"]["param_groups"]:
            own.pop("param_names")
        optimizer.load_state_dict(content["optimizer"])
        return FullyShardedDataParallel.optim_state_dict(sharded, optimizer)

    expected = on_ranks(3, save)[0]
    prefix, suffix = str(tmp_path / "three-"), "*.safetensors"
    consolidate_sharded_model_checkpoints(
        prefix, suffix, str(tmp_path / "whole.pth"), save_optimizer=True
    )
    check_equal(torch.load(tmp_path / "whole.pth")["optimizer"], expected)
    paths = reshard_checkpoints(
        prefix, suffix, world_size=2, save_prefix=str(tmp_path / "two")
    )
    check_equal(on_ranks(2, load)[0], expected)


def check_equal(found: Any, expected: Any) -> None:
    """Are two full states of an optimizer the same, and not of nothing?"""
    assert found["state"].keys() == expected["state"].keys()
    assert len(expected["state"]) == len(list(tree().parameters()))
    for name, values in expected["state"].items():
        assert values["exp_avg"].any(), name
        for key, value in values.items():
            assert torch.equal(found["state"][name][key], value), (name, key)
    assert [group["params"] for group in found["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]


def test_a_group_of_one_rank_has_whole_parameters() -> None:
    sharded = wrap(_C.Communicator(), tree(), use_orig_params=True)
    plain = tree()
    for model in (sharded, plain):
        mse(model, 0).backward()
        optim.LAMB(model.parameters()).step()
    check_parameters(sharded, plain)


def test_no_rank_goes_on_before_all_have_sharded_on_init() -> None:
    comes = threading.Event()
    modules = [nn.Linear(2, 2) for _ in range(2)]

    def work(group: _C.Communicator) -> bool:
        if group.rank == 1:
            time.sleep(0.3)  # who does not wait goes on meanwhile
            comes.set()
        wrap(group, modules[group.rank], execute_sharding_on_init=True)
        return comes.is_set()

    assert on_ranks(2, work) == [True, True]
