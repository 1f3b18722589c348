"""What every rank does with optimizer states of whole parameters: as fsdp_scenarios,
whose module, batches and losses these are."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from fsdp_scenarios import linear, mse, tree
from torch import nn

from ctrainer import optim
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import consolidate_sharded_model_checkpoints, save_shard

State = dict[str, Any]
FLAT = {"flatten_parameters": True, "on_neuron": False}
APART = {"on_neuron": False}
VIEWS = {"use_orig_params": True, **FLAT}


def nested(group: Any, options: dict[str, bool]) -> FSDP:
    model = tree()
    model[2] = FSDP(model[2], process_group=group, **options)
    return FSDP(model, process_group=group, **options)


def decayed_apart(model: nn.Module) -> list[State]:
    """Weights in one group, what has one dimension in another."""
    groups: list[State] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for param in model.parameters():
        dims = len(getattr(param, "_orig_size", param.shape))
        groups[dims < 2]["params"].append(param)
    return groups


def trained(model: nn.Module, optimizer: Any, group: Any = None) -> Any:
    for step in range(3):
        mse(model, step, group).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def assert_alike(found: State, expected: State, exact: bool = True) -> None:
    """Two full states; exact unless the gradients were added in another order."""
    assert found["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        assert found["state"][name].keys() == values.keys()
        for key, value in values.items():
            close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-7}
            torch.testing.assert_close(found["state"][name][key], value, **close)
    ours, theirs = (
        [g | {"params": sorted(g["params"])} for g in state["param_groups"]]
        for state in (found, expected)
    )
    assert ours == theirs


def of_one_process(kind: Any, apart: bool) -> State:
    """What an optimizer of the unwrapped module has, by names."""
    model = tree()
    params = decayed_apart(model) if apart else model.parameters()
    optimizer = trained(model, kind(params, lr=1e-2))
    return FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), "PARAM_NAME", model, optim=optimizer
    )


def scenario_a_full_state_is_that_of_the_unwrapped_modules_optimizer(
    group: Any,
) -> None:
    for kind in (torch.optim.AdamW, optim.AdamW):
        for options, apart in (
            (FLAT, False),
            (APART, True),
            (VIEWS, False),
            (VIEWS, True),
        ):
            model = nested(group, options)
            params = decayed_apart(model) if apart else model.parameters()
            optimizer = trained(model, kind(params, lr=1e-2), group)
            full = FSDP.full_optim_state_dict(model, optimizer)
            everywhere = FSDP.optim_state_dict(model, optimizer)
            assert bool(full) == (group.rank == 0)
            assert_alike(full or everywhere, everywhere)
            assert_alike(everywhere, of_one_process(kind, apart), exact=False)


def scenario_a_full_state_goes_to_shards_of_any_wrapping(group: Any) -> None:
    source = nested(group, FLAT)
    made = trained(source, torch.optim.AdamW(source.parameters(), lr=1e-2), group)
    full = FSDP.optim_state_dict(source, made)
    before = FSDP.optim_state_dict(source, made)
    for options in (FLAT, APART, VIEWS):
        model = nested(group, options)
        fresh = torch.optim.AdamW(decayed_apart(model), lr=1.0)
        if options is FLAT:
            fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
        loaded = FSDP.optim_state_dict_to_load(model, fresh, full, load_directly=True)
        assert len(loaded["param_groups"]) == len(fresh.param_groups)
        again = FSDP.optim_state_dict(model, fresh)
        assert again["state"].keys() == full["state"].keys()
        merged = sorted(n for g in again["param_groups"] for n in g["params"])
        again["param_groups"] = [again["param_groups"][0] | {"params": merged}]
        assert_alike(again, full)
    assert_alike(full, before)
    sent = full if group.rank == 0 else None
    scattered = FSDP.scatter_full_optim_state_dict(sent, source)
    own = made.state_dict()
    assert scattered["param_groups"] == own["param_groups"]
    for number, values in own["state"].items():
        for key, value in values.items():
            assert torch.equal(scattered["state"][number][key], value)


def scenario_consolidated_files_hold_the_full_state_of_several_groups(
    group: Any,
) -> None:
    model = nested(group, APART)
    params = decayed_apart(model)
    optimizer = trained(model, torch.optim.AdamW(params, lr=1e-2), group)
    folder = tempfile.mkdtemp().encode() if group.rank == 0 else None
    prefix = f"{group.broadcast_bytes(folder).decode()}/ckpt"
    state = FSDP.sharded_optim_state_dict(model, optimizer)
    content = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": state,
    }
    save_shard(content, f"{prefix}-{group.rank}.pth")
    full = FSDP.optim_state_dict(model, optimizer)
    group.barrier()
    if group.rank == 0:
        _, path = consolidate_sharded_model_checkpoints(
            prefix, "-?.pth", f"{prefix}.all.pth", save_optimizer=True
        )
        assert_alike(torch.load(path, weights_only=True)["optimizer"], full)
    group.barrier()
    optimizer.load_state_dict(state)
    assert_alike(FSDP.optim_state_dict(model, optimizer), full)


def scenario_states_that_do_not_fit_are_named(group: Any) -> None:
    model = nested(group, FLAT)
    optimizer = trained(model, torch.optim.AdamW(model.parameters(), lr=1.0), group)
    full = FSDP.optim_state_dict(model, optimizer)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(7))], lr=1.0)
    for call in (FSDP.optim_state_dict, FSDP.sharded_optim_state_dict):
        with pytest.raises(ValueError, match=r"of shape \(7,\), is no shard of this"):
            call(model, foreign)
    with pytest.raises(ValueError, match="is no parameter of this module"):
        FSDP.shard_full_optim_state_dict(full, model, optim=foreign)

    def rejected(text: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=text):
            FSDP.shard_full_optim_state_dict(full | changes, model)

    options = full["param_groups"][0]
    first, second, *others = options["params"]
    rejected(
        f"has no parameter '{first}'; it has {sorted([second, *others])[0]}",
        param_groups=[options | {"params": [second, *others]}],
    )
    rejected(
        f"'{second}' was saved with .* make the optimizer of the groups",
        param_groups=[
            options | {"params": [first]},
            options | {"params": [second, *others], "lr": 3.0},
        ],
    )
    state = full["state"]
    moved = state[second] | {"step": torch.tensor(9.0)}
    rejected(f"'step' of '{second}' is tensor.9", state=state | {second: moved})
    wide = state[second] | {"exp_avg": torch.ones(1, 1, 1)}
    rejected(f"'exp_avg' of '{second}' has shape", state=state | {second: wide})
    for key in (0, "PARAM"):
        with pytest.raises(ValueError, match=f"PARAM_NAME or PARAM_ID, got {key!r}"):
            FSDP.rekey_optim_state_dict(full, key, tree())
    with pytest.raises(ValueError, match=r"no parameter '0\.weight'"):
        FSDP.rekey_optim_state_dict(full, "PARAM_ID", linear(2, 2))
    with pytest.raises(ValueError, match="optim_state_dict: leave it out"):
        FSDP.optim_state_dict(model, optimizer, full)


def scenario_parameters_without_a_state_count_as_zeros_in_their_shard(
    group: Any,
) -> None:
    """As where a state was saved of parameters one by one and one had no gradient."""
    model = nested(group, FLAT)
    optimizer = trained(model, torch.optim.AdamW(model.parameters(), lr=1.0), group)
    full = FSDP.optim_state_dict(model, optimizer)
    lost = full["param_groups"][0]["params"][1]
    part = {name: values for name, values in full["state"].items() if name != lost}
    FSDP.optim_state_dict_to_load(model, optimizer, full | {"state": part}, False, True)
    again = FSDP.optim_state_dict(model, optimizer)
    assert again["state"][lost]["exp_avg"].eq(0).all()
    kept = {"state": {n: s for n, s in again["state"].items() if n != lost}}
    assert_alike(again | kept, full | {"state": part})
