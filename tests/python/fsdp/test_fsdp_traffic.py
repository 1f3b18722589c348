"""What ranks of sharded training send, counted beside what the plan says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from counting import Counting
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import hybrid_groups, memory_plan, units_of

MULTIPLE = 8
COMPARED = 8  # bytes that say what a rank has sharded, once before the first forward
CASES: list[dict[str, Any]] = [
    {},
    {"gather_bits": 8, "reduce_bits": 4},
    {"gather_bits": 4, "reduce_bits": 8, "error_feedback": False},
    {"reshard_after_forward": False},
    {"micro_batches": 3},
    {"micro_batches": 3, "reshard_after_forward": False},
]


def sent(counted: Counter[str], ranks: int) -> dict[str, int]:
    """Bytes that a rank sends to others, of what it gives to collectives."""
    parts = (counted["all_gather"] - COMPARED) * (ranks - 1)
    wholes = counted["reduce_scatter"] + counted["all_to_all"]
    return {"gather": parts, "reduce": wholes // ranks * (ranks - 1)}


def blocks(wrap: Any) -> FSDP:
    """Units of several sizes, one with a frozen parameter, in a root of its own."""
    with seeded(0):
        sizes = ((16, 40), (40, 300), (300, 70), (70, 30))
        first, *inner, frozen = [nn.Linear(i, o) for i, o in sizes]
    frozen.bias.requires_grad_(False)
    return wrap(nn.Sequential(first, *map(wrap, inner), wrap(frozen)))


def step(shared: Any, replicas: Any, options: dict[str, Any]) -> FSDP:
    group = shared if replicas is None else (shared, replicas)
    options = dict(options)
    micro_batches = options.pop("micro_batches", 1)

    def wrap(module: nn.Module) -> FSDP:
        return FSDP(
            module, process_group=group, flatten_parameters=True, on_neuron=False,
            _shard_size_multiple=MULTIPLE, execute_sharding_on_init=False, **options,
        )  # fmt: skip

    model = blocks(wrap)
    for _ in range(micro_batches - 1):
        with model.no_sync():
            model(torch.ones(4, 16)).square().sum().backward()
    model(torch.ones(4, 16)).square().sum().backward()
    return model


@pytest.mark.parametrize("case", range(len(CASES)))
def test_ranks_send_what_the_plan_says(case: int) -> None:
    options = CASES[case]

    def compare(group: _C.Communicator) -> None:
        counting = Counting(group)
        model = step(_C.Communicator(counting), None, options)
        plan = memory_plan(
            units_of(model), group.world_size, shard_size_multiple=MULTIPLE, **options
        )
        assert sent(counting.sent, group.world_size) == {
            "gather": plan.gather_traffic,
            "reduce": plan.reduce_traffic,
        }
        residuals = model.feedback_state_dict().values()
        kept = sum(residual.numel() * 4 for residual in residuals)
        assert 0 <= kept - plan.feedback < 4 * 4 * 32  # groups begin on cache lines
        assert (plan.feedback > 0) == (case == 1)

    on_ranks(3 if case == 0 else 2, compare)


def test_replicas_send_their_part_of_the_gradients_whole() -> None:
    options = {"reduce_bits": 4, "error_feedback": False}

    def compare(group: _C.Communicator) -> None:
        shared, replicas = (Counting(g) for g in hybrid_groups(2, group))
        made = (_C.Communicator(shared), _C.Communicator(replicas))
        model = step(*made, options)
        plan = memory_plan(
            units_of(model), 4, group_size=2, machine_size=2,
            shard_size_multiple=MULTIPLE, **options,
        )  # fmt: skip
        reduced = replicas.sent["all_reduce"]
        assert plan.replica_traffic == reduced  # 2 * (2 - 1) / 2 of it
        assert sent(shared.sent, 2)["reduce"] == plan.reduce_traffic
        assert plan.machine_traffic == 2 * reduced  # of both ranks, and nothing else

    on_ranks(4, compare)
