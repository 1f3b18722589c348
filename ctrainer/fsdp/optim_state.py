"""Optimizer states of whole parameters, and of this rank's shards.

torch's names for them. A full state is what the unwrapped module's optimizer would
have, by the parameters' names: {"state": {name: {...}}, "param_groups": [{...,
"params": [names]}]}, as `python -m ctrainer consolidate --optimizer` writes it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ctrainer.fsdp import _full, _metadata

State = dict[str, Any]
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Held:
    """A parameter that an optimizer has, and the whole ones that are in it."""

    param: Any
    names: list[str]  # of whole parameters, the first name of tied ones
    unit: Any = None  # whose shard it is; None: it is whole itself
    group: Any = None


def held_in(model: nn.Module) -> list[Held]:
    """Shards, units in the order of modules(), then what no unit has."""
    names = _full.names_of(model)
    units = _full.units_of(model)
    held = [
        Held(shard, [names[id(entry.param)][0] for entry in group.entries], unit, group)
        for unit, group, shard in _full.groups_of(units)
    ]
    sharded = {id(h.param) for h in held}
    return held + [
        Held(param, [_metadata.original_name(name)])
        for name, param in model.named_parameters()
        if id(param) not in sharded
    ]


# ---- from shards to whole parameters


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: Any = None,
) -> State:
    """The full state, in host memory; with rank0_only {} on other ranks. Collective.

    model: a unit, or a module around units. optim: made of model.parameters().
    optim_input and group have nothing to do: optim and the units know them.

    Raises ValueError for a parameter of the optimizer that is not the model's, and for
    a state that has neither its shard's shape nor one element.
    """
    held = held_in(model)
    names = {id(h.param): h.names for h in held}
    groups = [_renamed(given, names) for given in optim.param_groups]
    state: dict[str, State] = {}
    for owner in held:
        keep = owner.unit is None or owner.unit.rank == 0 or not rank0_only
        for key, value in optim.state.get(owner.param, {}).items():
            for name, whole in _whole_values(owner, key, value, keep):
                state.setdefault(name, {})[key] = whole
    if rank0_only and any(h.unit is not None and h.unit.rank != 0 for h in held):
        return {}
    return {"state": state, "param_groups": groups}


def _renamed(given: State, names: Mapping[int, list[str]]) -> State:
    unknown = [p for p in given["params"] if id(p) not in names]
    if unknown:
        raise ValueError(
            f"a parameter of the optimizer, of shape {tuple(unknown[0].shape)}, "
            "is no shard of this module: make it of module.parameters()"
        )
    own = [name for p in given["params"] for name in names[id(p)]]
    return _without_parameters(given) | {"params": own}


def _without_parameters(group: State) -> State:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _whole_values(
    owner: Held, key: str, value: Any, keep: bool
) -> Iterator[tuple[str, Any]]:
    """What each of owner's whole parameters has of it."""
    if not isinstance(value, torch.Tensor):
        yield from ((name, value) for name in owner.names)
        return
    if owner.unit is not None and value.shape == owner.param.shape:
        full = torch.empty(owner.group.size, dtype=value.dtype)
        owner.unit.communicator.all_gather(full, value.detach().cpu().reshape(-1))
        for name, entry in zip(owner.names, owner.group.entries, strict=keep):
            if keep:
                yield name, _full.view_of(full, entry).clone()
        return
    if owner.unit is not None and value.numel() > 1:
        raise ValueError(
            f"the optimizer's {key!r} has shape {tuple(value.shape)}, its shard "
            f"{tuple(owner.param.shape)}: it cannot be put together"
        )
    yield from ((name, value.detach().cpu().clone()) for name in owner.names)


# ---- from whole parameters to shards


def shard_full_optim_state_dict(
    full_optim_state_dict: State,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> State:
    """This rank's part of a full state, for load_state_dict() of the optimizer.

    full_optim_state_dict: on every rank, of any number of ranks and any wrapping; it is
    not changed. optim: the optimizer that will load it, whose groups may be others than
    those it was saved of; by default one of model.parameters() in the saved groups.
    optim_input has nothing to do.

    Raises ValueError naming parameters that the state does not have, or whose shapes or
    options differ where one shard holds several.
    """
    held = {id(h.param): h for h in held_in(model)}
    groups = full_optim_state_dict["param_groups"]
    saved = {name: group for group in groups for name in group["params"]}
    local = _groups_like(groups, model, held) if optim is None else optim.param_groups
    state: dict[int, State] = {}
    own_groups, at = [], 0
    for given in local:
        owners = [_known(held, saved, param) for param in given["params"]]
        numbers = list(range(at, at + len(owners)))
        own_groups.append(
            _without_parameters(given) | _options(owners, saved) | {"params": numbers}
        )
        for number, owner in zip(numbers, owners, strict=True):
            own = _own_state(owner, full_optim_state_dict["state"])
            if own:
                state[number] = own
        at += len(owners)
    return {"state": state, "param_groups": own_groups}


def _groups_like(
    groups: list[State], model: nn.Module, held: Mapping[int, Held]
) -> list[State]:
    """The saved groups with the model's parameters; frozen ones may have none."""
    index = {name: i for i, group in enumerate(groups) for name in group["params"]}
    local: list[State] = [group | {"params": []} for group in groups]
    for param in model.parameters():
        name = held[id(param)].names[0]
        if param.requires_grad or name in index:
            local[index.get(name, 0)]["params"].append(param)
    return local


def _known(held: Mapping[int, Held], saved: Mapping[str, State], param: Any) -> Held:
    owner = held.get(id(param))
    if owner is None:
        raise ValueError(
            f"a parameter of the optimizer, of shape {tuple(param.shape)}, is no "
            "parameter of this module: make it of module.parameters()"
        )
    missing = [name for name in owner.names if name not in saved]
    if missing:
        raise ValueError(
            f"the optimizer's state has no parameter {missing[0]!r}; it has "
            f"{', '.join(sorted(saved)[:8])}"
        )
    return owner


def _options(owners: list[Held], saved: Mapping[str, State]) -> State:
    """The options that all of them were saved with."""
    found: State = {}
    for owner in owners:
        for name in owner.names:
            options = _without_parameters(saved[name])
            if found and options != found:
                raise ValueError(
                    f"{name!r} was saved with {options}, other parameters of its group "
                    f"with {found}: make the optimizer of the groups that were saved"
                )
            found = options
    return found


def _own_state(owner: Held, state: Mapping[str, State]) -> State:
    found = [state.get(name) or {} for name in owner.names]
    keys = dict.fromkeys(key for values in found for key in values)
    return {key: _own_value(owner, key, [v.get(key) for v in found]) for key in keys}


def _own_value(owner: Held, key: str, values: list[Any]) -> Any:
    """This rank's part of what owner's whole parameters have; absent ones have 0."""
    some = next(v for v in values if v is not None)
    if owner.unit is None:
        return some
    if isinstance(some, torch.Tensor) and some.dim() > 0:
        return _own_part(owner, key, values, some.dtype)
    for name, value in zip(owner.names, values, strict=True):
        if value is not None and value != some:
            raise ValueError(
                f"the optimizer's {key!r} of {name!r} is {value!r}, of other "
                f"parameters of the same shard {some!r}"
            )
    return some.clone() if isinstance(some, torch.Tensor) else some


def _own_part(
    owner: Held, key: str, values: list[Any], dtype: torch.dtype
) -> torch.Tensor:
    made, parts = torch.zeros(owner.param.shape, dtype=dtype), []
    for name, entry, value in zip(
        owner.names, owner.group.entries, values, strict=True
    ):
        if value is None:
            continue
        if value.shape != entry.param.shape:
            raise ValueError(
                f"the optimizer's {key!r} of {name!r} has shape {tuple(value.shape)}, "
                f"the parameter {tuple(entry.param.shape)}"
            )
        parts.append((entry, value))
    _full.copy_own_parts(owner.unit, made, parts)
    return made


# ---- torch's other names


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: State | None = None,
    group: Any = None,
) -> State:
    """The full state on every rank: full_optim_state_dict with rank0_only=False.

    Raises ValueError for an optim_state_dict other than the optimizer's own.
    """
    if optim_state_dict is not None:
        raise ValueError("optim_state_dict: leave it out, the optimizer's own is taken")
    return full_optim_state_dict(model, optim, rank0_only=False)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: State,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> State:
    """shard_full_optim_state_dict for this optimizer, loaded too if load_directly.

    is_named_optimizer and group have nothing to do.
    """
    own = shard_full_optim_state_dict(optim_state_dict, model, optim=optim)
    if load_directly:
        optim.load_state_dict(own)
    return own


def scatter_full_optim_state_dict(
    full_optim_state_dict: State | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
    group: Any = None,
) -> State:
    """shard_full_optim_state_dict of rank 0's; other ranks pass None. Collective.

    Raises ValueError where the model has no unit, whose ranks these are.
    """
    units = _full.units_of(model)
    if not units:
        raise ValueError("the model has no sharded module")
    full = _broadcast(units[0].communicator, full_optim_state_dict)
    return shard_full_optim_state_dict(full, model, optim=optim)


def _broadcast(communicator: Any, state: State | None) -> State:
    """Rank 0's, as torch.save writes it."""
    file = io.BytesIO()
    if communicator.rank == 0:
        torch.save(state, file)
    sent = communicator.broadcast_bytes(file.getvalue() or None)
    received: State = torch.load(io.BytesIO(sent), weights_only=True)
    return received


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: Any = None
) -> State:
    """optim.state_dict() with param_names in its groups, as save_shard() keeps it: so
    consolidating tells its parameters even where there are several groups.

    Raises ValueError for a parameter of the optimizer that is not the model's.
    """
    names = {id(p): [_metadata.without_wrapper(n)] for n, p in model.named_parameters()}
    own: State = optim.state_dict()
    for mine, given in zip(own["param_groups"], optim.param_groups, strict=True):
        mine["param_names"] = _renamed(given, names)["params"]
    return own


def rekey_optim_state_dict(
    optim_state_dict: State,
    optim_state_key_type: Any,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> State:
    """A full state's names as the numbers that an optimizer of the unwrapped module
    has (PARAM_ID), or the other way round (PARAM_NAME).

    optim_state_key_type: torch's OptimStateKeyType, or its name. model: not wrapped.
    optim: of the model, which tells the numbers' order; by default model.parameters().

    Raises ValueError for another type, and for parameters that the model has not.
    """
    kind = getattr(optim_state_key_type, "name", optim_state_key_type)
    if kind not in ("PARAM_NAME", "PARAM_ID"):
        raise ValueError(f"expected PARAM_NAME or PARAM_ID, got {kind!r}")
    named = {id(p): name for name, p in model.named_parameters()}
    params = list(model.parameters())
    if optim is not None:
        params = [p for group in optim.param_groups for p in group["params"]]
    names = [named[id(p)] for p in params]
    pairs = list(enumerate(names))
    keys: dict[Any, Any] = dict(pairs)
    if kind == "PARAM_ID":
        keys = {name: number for number, name in pairs}
    return rekeyed(optim_state_dict, keys)


def rekeyed(full: State, keys: Mapping[Any, Any]) -> State:
    """The state by other keys. Raises ValueError for one that is not there."""
    used = [key for group in full["param_groups"] for key in group["params"]]
    unknown = [key for key in (*full["state"], *used) if key not in keys]
    if unknown:
        raise ValueError(f"the module has no parameter {unknown[0]!r}")
    return {
        "state": {keys[key]: dict(value) for key, value in full["state"].items()},
        "param_groups": [
            group | {"params": [keys[key] for key in group["params"]]}
            for group in full["param_groups"]
        ],
    }
