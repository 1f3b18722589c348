"""Hybrid sharding: parameters are sharded in groups of ranks, which are replicas."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsdp_scenarios import batch, check_parameters, check_same, mse, nested, tree, wrap
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C, BMUF
from ctrainer.fsdp import hybrid_groups

WORLD = 4
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"flatten_parameters": False, "shard_param_on_dim_0": True},
    {"reshard_after_forward": False},
    {"forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_replicas_of_two_shards_train_like_one_process(
    layout: dict[str, Any],
) -> None:
    plain = tree()

    def train(world: _C.Communicator) -> list[torch.Tensor]:
        sharded = nested(hybrid_groups(2, world), copy.deepcopy(plain), **layout)
        assert (sharded.world_size, sharded.rank) == (2, world.rank % 2)
        assert (sharded.replicas.world_size, sharded.replicas.rank) == (
            2,
            world.rank // 2,
        )
        check_same(world, sharded, copy.deepcopy(plain), steps=5)
        return [shard.detach().clone() for shard in sharded.parameters()]

    shards = on_ranks(WORLD, train)
    for rank in (0, 1):  # replicas have the same bits
        for mine, theirs in zip(shards[rank], shards[rank + 2], strict=True):
            assert torch.equal(mine, theirs)
    assert any(not torch.equal(a, b) for a, b in zip(*shards[:2], strict=True))


@pytest.mark.parametrize("context", ["sync", "no_sync"])
def test_replicas_accumulate(context: str) -> None:
    plain = tree()
    whole = copy.deepcopy(plain)
    (mse(whole, 0) + mse(whole, 1)).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    torch.optim.SGD(whole.parameters(), lr=1.0).step()

    def train(world: _C.Communicator) -> None:
        sharded = nested(hybrid_groups(2, world), copy.deepcopy(plain))
        first = sharded.no_sync() if context == "no_sync" else contextlib.nullcontext()
        with first:
            mse(sharded, 0, world).backward()
        mse(sharded, 1, world).backward()
        assert abs(sharded.clip_grad_norm_(1.0) - expected) < 1e-6
        torch.optim.SGD(sharded.parameters(), lr=1.0).step()
        check_parameters(sharded, whole)

    on_ranks(WORLD, train)


def test_a_replica_loads_what_another_has_saved() -> None:
    plain = tree()
    trained = tree(1)

    def load(world: _C.Communicator) -> None:
        groups = hybrid_groups(2, world)
        saved = nested(groups, copy.deepcopy(trained))
        fresh = nested(groups, copy.deepcopy(plain))
        fresh.load_state_dict(saved.state_dict())
        metadata = fresh.get_shard_metadata()
        assert (metadata["world_size"], metadata["rank"]) == (2, world.rank % 2)
        check_parameters(fresh, trained)
        with fresh.summon_full_params():
            assert torch.equal(fresh[0].weight, trained[0].weight)

    on_ranks(WORLD, load)


def test_units_that_a_policy_chooses_have_replicas_too() -> None:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, nn.Linear)

    plain = tree()

    def train(world: _C.Communicator) -> None:
        module = copy.deepcopy(plain)
        sharded = wrap(hybrid_groups(2, world), module, auto_wrap_policy=policy)
        assert all(unit.replicas is sharded.replicas for unit in sharded.units())
        check_same(world, sharded, copy.deepcopy(plain))

    on_ranks(WORLD, train)


def test_groups_that_make_no_replicas_are_rejected() -> None:
    alone, linear = _C.Communicator(), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="process_group is a tuple of 3; expected"):
        wrap((alone, alone, alone), linear)
    with pytest.raises(ValueError, match="ranks_a_group is 2; expected a divisor"):
        hybrid_groups(2, alone)

    def confuse(world: _C.Communicator) -> str:
        shards = world.split(world.rank // 2)
        crossed = world.split(key=world.rank, color=int(world.rank in (1, 2)))
        with pytest.raises(ValueError, match="do not have the same shards") as caught:
            wrap((shards, crossed), copy.deepcopy(linear))
        return str(caught.value)

    told = on_ranks(WORLD, confuse)
    assert told[0].startswith(
        "replica 1 has the shards of rank 1 of 2, replica 0 those of rank 0 of 2"
    )


def test_a_mesh_of_two_dimensions_is_replicas_and_shards() -> None:
    class Mesh:
        """What is read of torch's DeviceMesh."""

        def __init__(self, groups: list[_C.Communicator]) -> None:
            self.groups, self.ndim = groups, len(groups)

        def get_group(self, dim: int = 0) -> _C.Communicator:
            return self.groups[dim]

    plain = tree()

    def train(world: _C.Communicator) -> None:
        shards, replicas = hybrid_groups(2, world)
        mesh = Mesh([replicas, shards])
        sharded = wrap(None, copy.deepcopy(plain), device_mesh=mesh)
        assert (sharded.communicator, sharded.replicas) == (shards, replicas)
        check_same(world, sharded, copy.deepcopy(plain))
        flat = wrap(None, copy.deepcopy(plain), device_mesh=Mesh([world]))
        assert (flat.communicator, flat.replicas) == (world, None)
        with pytest.raises(ValueError, match="device_mesh has 3 dimensions; expected"):
            wrap(None, tree(), device_mesh=Mesh([world] * 3))

    on_ranks(WORLD, train)


# ---- blocks over shards


def blocks_of_one_process(
    plain: nn.Module, updates: int, every: int, momentum: float
) -> nn.Module:
    """BMUF of two workers that are whole modules, by its formulas."""
    workers = [copy.deepcopy(plain) for _ in range(2)]
    optimizers = [torch.optim.SGD(w.parameters(), lr=0.1) for w in workers]
    model = [p.detach().clone() for p in plain.parameters()]
    speed = [torch.zeros_like(p) for p in model]
    for update in range(updates):
        for index, (worker, optimizer) in enumerate(
            zip(workers, optimizers, strict=True)
        ):
            optimizer.zero_grad()
            half = SimpleNamespace(world_size=2, rank=index)
            mse(worker, update, half).backward()
            optimizer.step()
        if (update + 1) % every == 0:
            mine, theirs = ([p.detach() for p in w.parameters()] for w in workers)
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                speed[i] = momentum * speed[i] + (model[i] - (a + b) / 2)
                model[i] = model[i] - speed[i]
                a.copy_(model[i])
                b.copy_(model[i])
    return workers[0]


def test_groups_that_share_train_apart_in_blocks() -> None:
    plain = tree()
    updates, every, momentum = 6, 2, 0.5

    def train(world: _C.Communicator) -> None:
        shards, replicas = hybrid_groups(2, world)
        sharded = nested(shards, copy.deepcopy(plain))
        cfg = SimpleNamespace(
            global_sync_iter=every, block_momentum=momentum, warmup_iterations=0
        )
        inner = torch.optim.SGD(sharded.parameters(), lr=0.1)
        optimizer = BMUF(cfg, inner, replicas)
        for update in range(updates):
            optimizer.zero_grad()
            # The ranks of a group share its half of the batch.
            x, y = batch(update, world)
            ((sharded(x) - y) ** 2).mean().backward()
            optimizer.step()
        expected = blocks_of_one_process(plain, updates, every, momentum)
        check_parameters(sharded, expected)

    on_ranks(WORLD, train)
