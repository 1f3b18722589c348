"""What units that are gathered ahead do on every rank, and what has to come out."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import fsdp_scenarios as units
import pytest
import torch
from rank_threads import seeded
from torch import nn

WIDTH, DEPTH = 64, 4
Record = list[int]


def chain(group: Any, **options: Any) -> tuple[Any, int]:
    """Blocks of equal units below a root that has nothing, and a unit's bytes."""
    with seeded(0):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    blocks = [
        nn.Sequential(units.wrap(group, layer, **options), nn.Tanh(), nn.Tanh())
        for layer in layers
    ]
    model = units.wrap(group, nn.Sequential(*blocks), **options)
    return model, blocks[0][0]._groups[0].size * 4


def live_bytes(model: Any) -> tuple[Record, Record]:
    """What lies gathered or as gradients between the blocks: forward, then backward."""
    forward: Record = []
    backward: Record = []

    def note(_module: Any, _args: Any, out: torch.Tensor) -> None:
        forward.append(model._unit.live_bytes)
        if out.requires_grad:
            out.register_hook(lambda _: backward.append(model._unit.live_bytes))

    hooks = [block[1].register_forward_hook(note) for block in model.module.module]
    model(torch.ones(2, WIDTH)).sum().backward()
    for hook in hooks:
        hook.remove()
    return forward, backward


# ---- what is gathered when


def scenario_the_next_unit_is_begun_while_one_computes(group: Any) -> None:
    for options, ahead_forward, ahead_backward in (  # by block; units
        ({}, [0, 0, 0, 0], [0, 0, 0, 0]),
        ({"forward_prefetch": True}, [1, 1, 1, 0], [0, 0, 0, 0]),
        ({"backward_prefetch": "BACKWARD_PRE"}, [0, 0, 0, 0], [1, 1, 1, 1]),
        ({"backward_prefetch": "BACKWARD_POST"}, [0, 0, 0, 0], [0, 1, 1, 1]),
    ):
        model, unit = chain(group, **options)
        first = live_bytes(model)
        assert first == ([0] * DEPTH, [0] * DEPTH)  # no order is known yet
        forward, backward = live_bytes(model)
        assert forward == [unit * ahead for ahead in ahead_forward]
        assert backward == [unit * ahead for ahead in ahead_backward]
        assert model._unit.live_bytes == 0


def scenario_at_most_one_unit_more_takes_memory(group: Any) -> None:
    x = torch.ones(2, WIDTH)
    for options, more_forward, more_backward in (
        ({}, 0, 0),
        ({"forward_prefetch": True}, 1, 0),
        ({"backward_prefetch": "BACKWARD_PRE"}, 0, 1),
        ({"backward_prefetch": "BACKWARD_POST"}, 0, 0),
    ):
        model, unit = chain(group, **options)
        for _ in range(3):
            model._unit.peak_bytes = 0
            out = model(x)
            forward = model._unit.peak_bytes
            model._unit.peak_bytes = 0
            out.sum().backward()
            backward = model._unit.peak_bytes
        assert forward == (1 + more_forward) * unit
        assert backward == (2 + more_backward) * unit  # parameters and gradients


# ---- the same training


KINDS = ("BACKWARD_PRE", "BACKWARD_POST")
TRAINED = (
    units.scenario_gradients_accumulate_with_and_without_no_sync,
    units.scenario_frozen_and_trainable_parameters_share_a_unit,
    units.scenario_a_weight_that_is_read_detached_stays_for_the_input,
    units.scenario_units_are_used_twice_and_not_at_all,
    units.scenario_activation_checkpoints_of_both_kinds,
    units.scenario_one_graph_is_run_backward_twice,
    units.scenario_two_forwards_then_two_backwards,
    units.scenario_loading_after_an_evaluation_takes_effect,
    units.scenario_assigned_shards_are_used,
    units.scenario_an_exception_leaves_the_module_usable,
    units.scenario_summoned_parameters_can_be_read_and_written,
)


def scenario_what_trains_without_trains_with_it(group: Any) -> None:
    for kind in KINDS:
        units.EVERYWHERE.update(forward_prefetch=True, backward_prefetch=kind)
        try:
            for scenario in TRAINED:
                scenario(group)
        finally:
            units.EVERYWHERE.clear()


class Changing(nn.Module):
    """Blocks in an order that may change, and an error before any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.order = [0, 1, 2, 3]
        self.fails_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            if i == self.fails_at:
                raise KeyError("between two units")
            x = torch.tanh(self.blocks[i](x))
        return x[:, :4]


def changing(group: Any, kind: str) -> tuple[Any, Changing]:
    with seeded(0):
        plain = Changing()
    options = {"forward_prefetch": True, "backward_prefetch": kind}
    sharded = copy.deepcopy(plain)
    for i, block in enumerate(sharded.blocks):
        sharded.blocks[i] = units.wrap(group, block, **options)
    return units.wrap(group, sharded, **options), plain


def scenario_an_order_that_changes_is_followed(group: Any) -> None:
    for kind in KINDS:
        sharded, plain = changing(group, kind)
        for order in ([0, 1, 2, 3], [2, 0, 1], [3], [3, 2, 1, 0], [0, 0, 1]):
            plain.order = sharded.module.module.order = order
            units.check_same(group, sharded, plain, steps=2)
            assert sharded._unit.live_bytes == 0


def scenario_what_was_begun_goes_with_an_exception(group: Any) -> None:
    for kind in KINDS:
        sharded, plain = changing(group, kind)
        units.check_same(group, sharded, plain, steps=1)
        sharded.module.module.fails_at = 2
        with pytest.raises(KeyError, match="between"):
            units.mse(sharded, 0, group)
        assert sharded._unit.live_bytes == 0  # block 2 had been begun
        sharded.module.module.fails_at = -1
        units.check_same(group, sharded, plain)


def broken_backward(group: Any) -> Any:
    """A module whose backward has ended with block 2 begun, which nobody needs."""
    sharded, _ = changing(group, "BACKWARD_PRE")
    units.mse(sharded, 0, group).backward()
    last = sharded.module.module.blocks[3].module
    hook = last.register_forward_hook(lambda *given: units.Breaks.apply(given[2]))
    loss = units.mse(sharded, 0, group)
    hook.remove()
    with contextlib.suppress(KeyError):
        loss.backward()
    each = sharded.units()[1]._groups[0].size * 4
    assert sharded._unit.live_bytes == 2 * each  # block 3, and block 2 on its way
    with pytest.raises(RuntimeError, match="collectives are under way"):
        group.close()
    return sharded


def scenario_what_a_failed_backward_has_begun_is_dropped(group: Any) -> None:
    sharded = broken_backward(group)
    sharded.zero_grad()
    with sharded.summon_full_params():
        assert sharded._unit.live_bytes == 0
    units.mse(sharded, 0, group).backward()


def scenario_a_module_may_go_while_something_is_begun(group: Any) -> None:
    sharded = broken_backward(group)
    units_gone = [weakref.ref(unit._unit) for unit in sharded.units()]
    del sharded
    gc.collect()
    assert [gone() for gone in units_gone] == [None] * 5
    group.barrier()  # nothing is left over between the ranks


def scenario_codes_are_gathered_when_they_are_needed(group: Any) -> None:
    model, _ = chain(group, gather_bits=8, forward_prefetch=True)
    for _ in range(2):
        assert live_bytes(model) == ([0] * DEPTH, [0] * DEPTH)
