"""Values of modules that are sharded: those of the first rank, or new ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fsdp_scenarios import check_same, nested, on_meta, tree, wrap
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import hybrid_groups

SYNCED = {"sync_module_states": True}


class Tied(nn.Module):
    """A table that is used twice, a buffer of numbers and one of places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.out = nn.Linear(6, 12, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("places", torch.arange(3), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(3.0)
            self.places.copy_(torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, :3].abs() * 4).long() % 12
        return self.out(self.table(ids) * self.scale + self.places[:, None]).mean(1)


@pytest.mark.parametrize("flat", [True, False])
def test_ranks_without_values_take_those_of_the_first(flat: bool) -> None:
    plain = tree()
    bare = [plain, on_meta(plain)]

    def train(group: _C.Communicator) -> None:
        module = copy.deepcopy(bare[group.rank])
        sharded = nested(group, module, flatten_parameters=flat, **SYNCED)
        check_same(group, sharded, copy.deepcopy(plain))

    on_ranks(2, train)


def test_modules_that_have_values_leave_torchs_setting_of_the_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it is set, what another thread loads or casts loses its attributes."""
    empty = on_meta(nn.Linear(2, 2))
    changed = []
    change = torch.__future__.set_swap_module_params_on_conversion

    def noted(value: bool) -> None:
        changed.append(value)
        change(value)

    monkeypatch.setattr(torch.__future__, change.__name__, noted)
    nested(_C.Communicator(), tree())
    assert changed == []
    wrap(_C.Communicator(), empty)
    assert changed == [True, False]


def test_ranks_with_other_values_take_those_of_the_first() -> None:
    def train(group: _C.Communicator) -> None:
        sharded = nested(group, tree(seed=group.rank), **SYNCED)
        check_same(group, sharded, tree(seed=0))

    on_ranks(2, train)


def test_tied_parameters_and_buffers_arrive_as_they_are() -> None:
    plain = Tied()
    bare = [plain, on_meta(plain)]

    def compare(group: _C.Communicator) -> None:
        module = copy.deepcopy(bare[group.rank])
        table = module.table.weight
        sharded = wrap(group, module, **SYNCED)
        assert [group.orig_size for group in sharded._groups] == [torch.Size([72])]
        assert module.out.weight is module.table.weight is table
        assert torch.equal(module.places, torch.arange(3))
        found = sharded.full_state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), name

    on_ranks(2, compare)


def test_replicas_take_the_values_of_the_first_rank_of_all() -> None:
    plain = tree()
    bare = on_meta(plain)

    def compare(world: _C.Communicator) -> list[torch.Tensor]:
        module = copy.deepcopy(plain if world.rank == 0 else bare)
        sharded = wrap(hybrid_groups(2, world), module, **SYNCED)
        return list(sharded.full_state_dict().values())

    for found in on_ranks(4, compare):
        for value, expected in zip(found, plain.state_dict().values(), strict=True):
            assert torch.equal(value, expected)


def test_units_of_a_policy_take_them_too() -> None:
    plain = tree()
    bare = [plain, on_meta(plain)]

    def compare(group: _C.Communicator) -> None:
        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return isinstance(module, nn.Linear)

        module = copy.deepcopy(bare[group.rank])
        sharded = wrap(group, module, auto_wrap_policy=policy, **SYNCED)
        assert len(sharded.units()) == 4
        check_same(group, sharded, copy.deepcopy(plain))

    on_ranks(2, compare)


def test_what_is_wrong_on_the_first_rank_or_between_ranks_is_told_to_all() -> None:
    class Bare(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty(size, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    others = [nn.Linear(3, 3), nn.Linear(3, 4)]

    def reject(group: _C.Communicator) -> None:
        with pytest.raises(ValueError, match=r"^gain of a Bare on the meta device got"):
            wrap(group, Bare(3), **SYNCED)
        with pytest.raises(ValueError, match="parameter or buffer 0 is 'weight"):
            wrap(group, others[group.rank], **SYNCED)

    on_ranks(2, reject)


def test_modules_on_the_meta_device_begin_with_new_values() -> None:
    torch.manual_seed(3)
    module = on_meta(nn.Sequential(Tied(), nn.BatchNorm1d(12), nn.Linear(12, 12)))
    module[0].out.weight.kind = "table"
    sharded = wrap(_C.Communicator(), module)
    state = sharded.full_state_dict()
    assert state["0.table.weight"] is state["0.out.weight"]
    assert module[0].out.weight is module[0].table.weight
    assert module[0].table.weight.kind == "table"
    assert 0.5 < float(state["0.table.weight"].std()) < 1.5  # as nn.Embedding begins
    assert float(state["2.weight"].abs().max()) <= 1 / 12**0.5  # and nn.Linear
    assert torch.equal(state["0.scale"], torch.full((6,), 3.0))
    assert torch.equal(state["1.running_var"], torch.ones(12))
    assert torch.equal(module[0].places, torch.arange(3))


def test_the_module_around_says_what_the_values_are() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.25)
                nn.init.zeros_(module.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[1](self.inner[0](x))

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, nn.Linear)

    with torch.device("meta"):
        module = Around()
    sharded = wrap(_C.Communicator(), module, auto_wrap_policy=policy)
    assert len(sharded.units()) == 3
    assert torch.equal(sharded(torch.ones(1, 4)), torch.ones(1, 4))


def test_a_function_of_ones_own_goes_before() -> None:
    def init(module: Any) -> None:
        module.to_empty(device="cpu", recurse=False)
        nn.init.ones_(module.weight)

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        module[1].weight = module[0].weight
    sharded = wrap(_C.Communicator(), module, param_init_fn=init)
    assert len(list(sharded.parameters())) == 1  # to_empty() left them tied
    assert torch.equal(sharded(torch.ones(1, 2)), torch.full((1, 2), 4.0))
