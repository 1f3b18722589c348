"""What every rank does with summoned, reset and shared parameters of fairscale's units:
as fairscale_scenarios, whose modules these are."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import pytest
import torch
from fairscale_scenarios import assert_close, dumped, nested, train
from fsdp_scenarios import WIDTH, batch, linear, mse, tree
from rank_threads import seeded
from torch import nn

from ctrainer.compat.fairscale import FullyShardedDataParallel, TrainingState
from ctrainer.fsdp import FullyShardedDataParallel as Engine


def gathered_json(group: Any, value: Any) -> list[Any]:
    """That of every rank, in plain types."""
    return [json.loads(own) for own in group.gather_bytes(json.dumps(value).encode())]


def scenario_names_and_attributes_are_fairscales(group: Any) -> None:
    for flat, names in (
        (False, {name for name, _ in tree().named_parameters()}),
        (True, {"_fsdp_wrapped_module.flat_param_0",
                "_fsdp_wrapped_module._fpw_module.2._fsdp_wrapped_module.flat_param_0"}),
    ):  # fmt: skip
        model = nested(group, flatten_parameters=flat)
        assert {name for name, _ in model.named_parameters()} == names
        assert model.params == model.sharded_params
        assert model.process_group_reduce_scatter is model.process_group
    for outer, inner, name in (
        (False, True, "2.flat_param_0"),
        (True, False, "_fsdp_wrapped_module._fpw_module.2._fsdp_wrapped_module."
                      "_fpw_module.0.weight"),
    ):  # fmt: skip
        module = tree()
        module[2] = FullyShardedDataParallel(module[2], group, flatten_parameters=inner)
        model = FullyShardedDataParallel(module, group, flatten_parameters=outer)
        assert name in {name for name, _ in model.named_parameters()}
    layer = FullyShardedDataParallel(linear(2, 2), group, allow_reset_parameters=True)
    before = layer.state_dict()["weight"]
    with layer.summon_full_params(), seeded(1):
        layer.reset_parameters()
    assert not torch.equal(layer.state_dict()["weight"], before)


def scenario_summoned_parameters_are_listed_by_their_names(group: Any) -> None:
    model, plain = nested(group), tree()
    shards = [name for name, _ in model.named_parameters()]
    with model.summon_full_params(), torch.no_grad():
        listed = dict(model.named_parameters())
        assert listed.keys() == dict(plain.named_parameters()).keys()
        assert_close(listed, plain.state_dict())
        model.module.apply(lambda m: hasattr(m, "bias") and m.bias.fill_(3.0))
        assert_close(model.module[0].state_dict(), model.module.module[0].state_dict())
        changed = model.state_dict()
        assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
        with pytest.raises(ValueError, match=r"state is TrainingState\.SUMMON_FULL"):
            model.local_state_dict()
        plain.load_state_dict(changed)
        x = batch(0, group)[0]
        torch.testing.assert_close(model(x), plain(x))
    assert changed["0.bias"].eq(3.0).all()
    assert_close(model.state_dict(), changed)
    assert [name for name, _ in model.named_parameters()] == shards
    assert model.training_state is TrainingState.IDLE
    with (
        pytest.raises(RuntimeError, match=r"0\.bias was replaced"),
        model.summon_full_params(),
    ):
        model.module[0].bias = nn.Parameter(torch.zeros(10))
    mse(model, 0, group).backward()
    assert len(model.params_with_grad) == len(shards)


class Resettable(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        nn.init.zeros_(self.bias)


def scenario_parameters_may_be_reset_where_that_is_allowed(group: Any) -> None:
    rejecting = FullyShardedDataParallel(Resettable(3, 3), group)
    with pytest.raises(RuntimeError, match="not allowed: construct with allow_reset"):
        rejecting.reset_parameters()
    model = FullyShardedDataParallel(
        Resettable(3, 3), group, allow_reset_parameters=True
    )
    with model.summon_full_params(), torch.no_grad():
        model.module.weight.fill_(7.0)
    assert model.state_dict()["weight"].eq(7.0).all()
    model.reset_parameters()
    assert model.state_dict()["weight"].eq(0.5).all()


class Siblings(nn.Module):
    """Two layers with one weight, each a unit, in either order of wrapping."""

    def __init__(self, group: Any = None, order: tuple[int, ...] = ()) -> None:
        super().__init__()
        with seeded(1):
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            self.head = nn.Linear(WIDTH, 4)
        self.layers[2].weight = self.layers[0].weight
        for i in order:
            unit = FullyShardedDataParallel(
                self.layers[i], group, flatten_parameters=False
            )
            self.layers[i] = unit
        if order:
            first, second = order
            assert len(self.layers[second].borrowed) == 1
            self.layers[second].append_shared_param(self.layers[first].module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        result: torch.Tensor = self.head(x)
        return result


def scenario_units_beside_each_other_share_a_parameter(group: Any) -> None:
    plain = Siblings()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    for order in ((0, 2), (2, 0)):
        inner = Siblings(group, order)
        model = FullyShardedDataParallel(inner, group)
        train(model, torch.optim.SGD(model.parameters(), lr=0.5), group)
        state = model.state_dict()
        assert_close(state, plain.state_dict())
        fresh = FullyShardedDataParallel(Siblings(group, order), group)
        fresh.load_state_dict(state)
        assert_close(fresh.state_dict(), state)
        weights = [group.gather_bytes(dumped(model.local_state_dict()))]
        local = [torch.load(io.BytesIO(b), weights_only=True) for b in weights[0]]
        metadata = gathered_json(group, model.local_metadata_dict())
        whole = model.consolidate_shard_weights(local, metadata)
        assert_close(dict(sorted(whole.items())), dict(sorted(state.items())))
        with model.summon_full_params():
            names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
            assert names == set(state)


def scenario_a_copy_shares_a_parameter_of_its_own(group: Any) -> None:
    for order in ((0, 2), (2, 0)):
        plain, inner = Siblings(), Siblings(group, order)
        model = FullyShardedDataParallel(inner, group)
        train(model, torch.optim.SGD(model.parameters(), lr=0.5), group)
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
        before = model.state_dict()
        made = copy.deepcopy(model)
        train(made, torch.optim.SGD(made.parameters(), lr=0.5), group)
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
        assert_close(made.state_dict(), plain.state_dict())
        assert_close(model.state_dict(), before)
        alone = copy.deepcopy(inner.layers[order[1]])
        with pytest.raises(RuntimeError, match="weight is borrowed from a unit that "):
            alone(torch.ones(1, WIDTH))


def scenario_parameters_that_cannot_be_shared_are_named(group: Any) -> None:
    outer = nn.Sequential(linear(3, 3), linear(3, 3))
    outer[1].weight = outer[0].weight
    outer[0] = FullyShardedDataParallel(outer[0], group, flatten_parameters=False)
    with pytest.raises(ValueError, match=r"1\.weight is a parameter of a unit below"):
        FullyShardedDataParallel(outer, group)
    with pytest.raises(
        ValueError, match=r"weight is a parameter of another unit, too: .* of this \w+$"
    ):
        Engine(outer[1], process_group=group)
    borrower = FullyShardedDataParallel(outer[1], group, flatten_parameters=False)
    own = borrower.non_shared_params()
    assert len(own) == 1
    with pytest.raises(AssertionError, match="p is no parameter that this module sh"):
        borrower.append_shared_param(own[0])
    with pytest.raises(RuntimeError, match="inside of a unit around both"):
        borrower(torch.ones(1, 3))


def scenario_buffers_may_be_left_out_of_consolidated_weights(group: Any) -> None:
    model = FullyShardedDataParallel(
        nn.Sequential(linear(WIDTH, 5), nn.BatchNorm1d(5)), group
    )
    assert model.params[0].numel() * group.world_size > 5 * WIDTH + 15  # is padded
    weights = group.gather_bytes(dumped(model.local_state_dict()))
    local = [torch.load(io.BytesIO(b), weights_only=True) for b in weights]
    metadata = gathered_json(group, model.local_metadata_dict())
    whole = model.consolidate_shard_weights(local, metadata, with_module_buffers=False)
    state = model.state_dict()
    assert_close(whole, {name: state[name] for name in (
        "0.weight", "0.bias", "1.weight", "1.bias"
    )})  # fmt: skip
    del local[0]["1.running_mean"]
    with pytest.raises(ValueError, match=r"'1\.running_mean' .* pass strict=False"):
        model.consolidate_shard_weights(local, metadata)
    whole = model.consolidate_shard_weights(local, metadata, strict=False)
    assert state.keys() - whole.keys() == {"1.running_mean"}
