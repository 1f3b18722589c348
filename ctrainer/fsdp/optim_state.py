"""Optimizer states of whole parameters, and of this rank's shards.

torch's names for them. A full state is what the unwrapped module's optimizer would
have, by the parameters' names: {"state": {name: {...}}, "param_groups": [{...,
"params": [names]}]}, as `ctrainer consolidate --optimizer` writes it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ctrainer.fsdp import full_params, shard_files
from ctrainer.fsdp.consolidate import BLOCKS, MAPS, OF_WHOLE, zero_in

# Which parts of which parameters an optimizer of a sharded module has.


@dataclass(frozen=True)
class Held:
    """A parameter that an optimizer has, and the whole ones of which it has parts."""

    param: Any
    names: list[str]  # of whole parameters, the first name of tied ones
    unit: Any = None  # None: it is whole itself
    entries: tuple[Any, ...] = ()
    begin: int = 0  # in the group, of this rank's first element
    grain: int = 0  # the group's


@dataclass(frozen=True)
class HeldShard:
    """A shard: one parameter of an optimizer, or with use_orig_params several."""

    held: list[Held]
    unit: Any
    group: Any
    numel: int


def shards_of(model: nn.Module) -> list[HeldShard]:
    """Units in the order of modules()."""
    names = full_params.names_of(model)
    found = []
    for unit in full_params.units_of(model):
        for i, (_, group, shard) in enumerate(full_params.groups_of([unit])):
            first = unit.rank * shard.numel()
            firsts = [names[id(entry.param)][0] for entry in group.entries]
            grain = group.grain
            held = [Held(shard, firsts, unit, tuple(group.entries), first, grain)]
            if unit.use_orig_params:
                held = [
                    Held(view, [name], unit, (entry,), first + begin, grain)
                    for name, entry, (view, begin) in zip(
                        firsts, group.entries, unit._views[i].pieces, strict=True
                    )
                ]
            found.append(HeldShard(held, unit, group, shard.numel()))
    return found


def held_in(model: nn.Module) -> list[Held]:
    """What parameters() yields: of units, and then what no unit has."""
    held = [one for shard in shards_of(model) for one in shard.held]
    return held + whole_in(model, held)


def whole_in(model: nn.Module, held: list[Held]) -> list[Held]:
    sharded = {id(one.param) for one in held}
    return [
        Held(param, [shard_files.original_name(name)])
        for name, param in model.named_parameters()
        if id(param) not in sharded
    ]


State = dict[str, Any]
Optimizer = torch.optim.Optimizer


# ---- from shards to whole parameters


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: Any = None,
) -> State:
    """Return the full state, in host memory; with rank0_only {} on other ranks.

    Collective.

    Args:
        model (nn.Module): A unit, or a module around units.
        optim (Optimizer): Made of model.parameters().
        optim_input (default None): No effect: optim knows it.
        rank0_only (bool, default True): Only the first rank gets the state.
        group (default None): No effect: the units know it.

    Raises:
        ValueError: a parameter of the optimizer that is not the model's, or a state
            that has neither its shard's shape nor one element.
    """
    shards = shards_of(model)
    held = [one for shard in shards for one in shard.held]
    whole = whole_in(model, held)
    names = {id(one.param): one.names for one in (*held, *whole)}
    groups = [_renamed(given, names) for given in optim.param_groups]
    state: dict[str, State] = {}
    for shard in shards:
        _add_shard(state, shard, optim, keep=shard.unit.rank == 0 or not rank0_only)
    for one in whole:
        for key, value in optim.state.get(one.param, {}).items():
            state.setdefault(one.names[0], {})[key] = _copy(value)
    if rank0_only and any(shard.unit.rank != 0 for shard in shards):
        return {}
    return {"state": state, "param_groups": groups}


def whole_values(model: nn.Module, optim: Optimizer) -> Iterator[tuple[str, str, Any]]:
    """(name, key, value) of what the optimizer has of each whole parameter, a shard at
    a time, on every rank. Collective."""
    for shard in shards_of(model):
        state: dict[str, State] = {}
        _add_shard(state, shard, optim, keep=True)
        for name, values in state.items():
            yield from ((name, key, value) for key, value in values.items())


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


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _add_shard(
    state: dict[str, State], shard: HeldShard, optim: Optimizer, keep: bool
) -> None:
    """What the whole parameters in a shard have. Collective."""
    own = [optim.state.get(one.param, {}) for one in shard.held]
    for key in dict.fromkeys(key for values in own for key in values):
        found = [
            (one, v[key]) for one, v in zip(shard.held, own, strict=True) if key in v
        ]
        spreads = [_spread(one, key, value, one.param.shape) for one, value in found]
        if None in spreads:
            values = _agreed(shard, found)
            for (one, _), value in zip(found, values, strict=True):
                for name in one.names:
                    state.setdefault(name, {})[key] = _copy(value)
            continue
        # Short parameters have values of other dtypes than long ones.
        kinds = [(s, v.dtype) for s, (_, v) in zip(spreads, found, strict=True) if s]
        for kind in dict.fromkeys(kinds):
            alike = [f for f, own in zip(found, kinds, strict=True) if own == kind]
            for name, value in _gathered(shard, alike, *kind):
                if keep:
                    state.setdefault(name, {})[key] = value.clone()


class _Spread(NamedTuple):
    """How a value lies over a parameter, of which each rank has a part: in rows, as
    8-bit AdEMAMix has two, of a number for each `block` elements."""

    rows: int | None  # None: one, which is no dimension of the value
    block: int


def _spread(one: Held, key: str, value: Any, shape: torch.Size) -> _Spread | None:
    """That of a value beside elements of this shape; None: one value for all of them.

    A parameter of one element counts by the dimensions of the value."""
    if key in OF_WHOLE or not isinstance(value, torch.Tensor):
        return None
    block = BLOCKS.get(key, 1)
    own = shape if block == 1 else torch.Size([-(-shape.numel() // block)])
    more = value.dim() - len(own)
    if value.shape[more:] == own and more in (0, 1) and one.grain % block == 0:
        return _Spread(value.shape[0] if more else None, block)
    if value.numel() > 1 or block > 1:
        raise ValueError(
            f"the optimizer's {key!r} has shape {tuple(value.shape)}, its shard "
            f"{tuple(shape)}: it cannot be put together"
            + (f"; shards of block_size={block} can" if block > 1 else "")
        )
    return None


def _agreed(shard: HeldShard, found: list[tuple[Held, Any]]) -> list[Any]:
    """Numbers, such as counts of steps, from ranks that have elements of the parameter:
    an optimizer may skip an empty part. Collective for several."""
    values = [value for _, value in found]
    views = shard.unit.use_orig_params
    if not views or not all(_is_number(value) for value in values):
        return values
    most = torch.tensor(
        [float(v) if one.param.numel() else -math.inf for one, v in found],
        dtype=torch.float64,
        device="cpu",
    )
    shard.unit.communicator.all_reduce(most, "max")
    return [
        _like(value, number)
        for value, number in zip(values, most.tolist(), strict=True)
    ]


def _like(value: Any, number: float) -> Any:
    if number == -math.inf:  # nobody has elements
        return value
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, number)
    return type(value)(number)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _gathered(
    shard: HeldShard,
    found: list[tuple[Held, torch.Tensor]],
    spread: _Spread,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The values of all ranks, by the names of whole parameters. Collective."""
    rows, block = spread
    lines, n, world = rows or 1, shard.numel // block, shard.unit.world_size
    own = torch.zeros(lines, n, dtype=dtype, device="cpu")
    for one, value in found:
        at = (one.begin - shard.unit.rank * shard.numel) // block
        values = _by_row(value, rows)
        own[:, at : at + values.shape[1]] = values
    full = torch.empty(world, lines, n, dtype=dtype, device="cpu")
    shard.unit.communicator.all_gather(full, own)
    flat = full.transpose(0, 1).reshape(lines, world * n)
    for one, _ in found:
        for name, entry in zip(one.names, one.entries, strict=True):
            at, count = entry.at // block, -(-entry.numel // block)
            shape = entry.param.shape if block == 1 else torch.Size([count])
            yield name, _shaped(flat[:, at : at + count], rows, shape)


# ---- from whole parameters to shards


def shard_full_optim_state_dict(
    full_optim_state_dict: State,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> State:
    """Return this rank's part of a full state, for load_state_dict() of the optimizer.

    Args:
        full_optim_state_dict (State): On every rank, of any number of ranks and any
            wrapping; it is not changed.
        model (nn.Module): A unit, or a module around units.
        optim_input (default None): No effect.
        optim (Optimizer | None, default None): The optimizer that will load it, whose
            groups may be others than those it was saved of; None: one of
            model.parameters() in the saved groups.

    Raises:
        ValueError: parameters that the state does not have, or whose shapes or options
            differ where one shard holds several; the message names them.
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
    numbers = {name: v[name] for v in found for name in MAPS.values() if name in v}
    zeros = {key: zero_in(numbers[n]) for key, n in MAPS.items() if n in numbers}
    return {
        key: _own_value(owner, key, [v.get(key) for v in found], zeros.get(key, 0))
        for key in keys
    }


def _own_value(owner: Held, key: str, values: list[Any], zero: int) -> Any:
    """This rank's part of what owner's whole parameters have; absent ones have 0, for
    which `zero` stands."""
    some = next(v for v in values if v is not None)
    if owner.unit is None:
        return some
    if key in MAPS.values() or (key in OF_WHOLE and len(owner.names) == 1):
        return some.clone()
    if isinstance(some, torch.Tensor) and some.dim() > 0:
        return _own_part(owner, key, values, some.dtype, zero)
    for name, value in zip(owner.names, values, strict=True):
        if value is not None and value != some:
            raise ValueError(
                f"the optimizer's {key!r} of {name!r} is {value!r}, of other "
                f"parameters of the same shard {some!r}"
            )
    return some.clone() if isinstance(some, torch.Tensor) else some


def _own_part(
    owner: Held, key: str, values: list[Any], dtype: torch.dtype, zero: int
) -> torch.Tensor:
    spreads: set[_Spread | None] = set()
    for name, entry, value in zip(owner.names, owner.entries, values, strict=True):
        if value is None:
            continue
        spreads.add(_spread(owner, key, value, entry.param.shape))
        if None in spreads or len(spreads) > 1 or value.dtype != dtype:
            raise ValueError(
                f"the optimizer's {key!r} of {name!r} has shape {tuple(value.shape)} "
                f"and {value.dtype}, the parameter shape {tuple(entry.param.shape)}"
            )
    rows, block = spreads.pop() or _Spread(None, 1)
    n = -(-owner.param.numel() // block)
    made = torch.full((rows or 1, n), zero, dtype=dtype, device="cpu")
    for entry, value in zip(owner.entries, values, strict=True):
        if value is not None:
            own, whole = entry.overlap(owner.begin, owner.param.numel())
            count = -(-(own.stop - own.start) // block)
            at, first = own.start // block, whole.start // block
            flat = _by_row(value, rows)
            made[:, at : at + count] = flat[:, first : first + count]
    return _shaped(made, rows, owner.param.shape if block == 1 else torch.Size([n]))


def _by_row(value: torch.Tensor, rows: int | None) -> torch.Tensor:
    lines = rows or 1
    return value.detach().reshape(lines, value.numel() // lines)


def _shaped(by_row: torch.Tensor, rows: int | None, shape: torch.Size) -> torch.Tensor:
    return by_row.reshape(shape if rows is None else (rows, *shape))


# ---- torch's other names


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: State | None = None,
    group: Any = None,
) -> State:
    """Return the full state on every rank: full_optim_state_dict with rank0_only=False.

    Args:
        model (nn.Module): A unit, or a module around units.
        optim (Optimizer): Made of model.parameters().
        optim_state_dict (State | None, default None): None: the optimizer's own is
            taken.
        group (default None): No effect.

    Raises:
        ValueError: an optim_state_dict is given.
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
    """Return shard_full_optim_state_dict for this optimizer.

    Args:
        model (nn.Module): A unit, or a module around units.
        optim (Optimizer): The optimizer that will load it.
        optim_state_dict (State): The full state.
        is_named_optimizer (bool, default False): No effect.
        load_directly (bool, default False): Load it, too.
        group (default None): No effect.
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
    """Return shard_full_optim_state_dict of rank 0's full state. Collective.

    Args:
        full_optim_state_dict (State | None): The full state on rank 0, None on others.
        model (nn.Module): A unit, or a module around units.
        optim_input (default None): No effect.
        optim (Optimizer | None, default None): The optimizer that will load it; None:
            one of model.parameters().
        group (default None): No effect.

    Raises:
        ValueError: the model has no unit, whose ranks these are.
    """
    units = full_params.units_of(model)
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
    """Return optim.state_dict() with param_names in its groups, as save_shard() keeps
    it.

    Consolidating finds its parameters by them even where there are several groups.

    Args:
        model (nn.Module): A unit, or a module around units.
        optim (Optimizer): Made of model.parameters().
        group (default None): No effect.

    Raises:
        ValueError: a parameter of the optimizer that is not the model's.
    """
    names = {
        id(p): [shard_files.without_wrapper(n)] for n, p in model.named_parameters()
    }
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
    """Return a full state with names in place of numbers, or the other way round.

    Args:
        optim_state_dict (State): The full state.
        optim_state_key_type (OptimStateKeyType | str): PARAM_ID: the numbers that an
            optimizer of the unwrapped module has; PARAM_NAME: names.
        model (nn.Module): Not wrapped.
        optim_input (default None): No effect.
        optim (Optimizer | None, default None): Of the model, whose groups say the
            numbers' order; None: model.parameters().

    Raises:
        ValueError: another type, and parameters that the model has not.
    """
    kind = getattr(optim_state_key_type, "name", optim_state_key_type)
    if kind not in ("PARAM_NAME", "PARAM_ID"):
        raise ValueError(f"expected PARAM_NAME or PARAM_ID, got {kind!r}")
    named = {id(p): name for name, p in model.named_parameters()}
    params = list(model.parameters())
    if optim is not None:
        params = [p for group in optim.param_groups for p in group["params"]]
    names = [named[id(p)] for p in params]
    by_number: dict[Any, Any] = dict(enumerate(names))
    by_name: dict[Any, Any] = {name: number for number, name in by_number.items()}
    return rekeyed(optim_state_dict, by_name if kind == "PARAM_ID" else by_number)


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
