"""All values of sharded parameters: for a while, or as a state_dict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ctrainer.fsdp import shard_files
from ctrainer.fsdp.layout import Entry, Group, Place
from ctrainer.fsdp.sharded import ShardedModule, TrainingState


def gathered(unit: Any, group: Group, shard: torch.Tensor) -> torch.Tensor:
    """A group's values from all ranks, flat, of the shards' dtype. Collective."""
    full = torch.empty(group.size, dtype=shard.dtype, device=shard.device)
    unit.communicator.all_gather(full, shard.detach().reshape(-1))
    return full


def view_of(full: torch.Tensor, entry: Entry) -> torch.Tensor:
    return full[entry.at : entry.at + entry.numel].view(entry.param.shape)


def own_part(unit: Any, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    begin = unit.rank * shard.numel()
    return full[begin : begin + shard.numel()].view_as(shard)


def is_unit(module: Any) -> bool:
    return isinstance(module, ShardedModule)


def units_of(root: Any) -> list[Any]:
    """In the order of modules()."""
    return [module for module in root.modules() if is_unit(module)]


def groups_of(units: list[Any]) -> Iterator[tuple[Any, Group, torch.Tensor]]:
    for unit in units:
        for group, shard in zip(unit._groups, unit.sharded_params, strict=True):
            yield unit, group, shard


def entries_of(units: list[Any]) -> Iterator[Entry]:
    for _, group, _ in groups_of(units):
        yield from group.entries


@contextlib.contextmanager
def summoned(units: list[Any], writeback: bool) -> Iterator[None]:
    """Within it parameters are views of gathered tensors. Collective."""
    fulls, values = [], []
    for unit, group, shard in groups_of(units):
        full = gathered(unit, group, shard)
        fulls.append((unit, full, shard))
        values += [(entry, view_of(full, entry)) for entry in group.entries]
    with shown(units, values):
        yield
        _check_kept(units)
        for unit, full, shard in fulls if writeback else ():
            shard.detach().copy_(own_part(unit, full, shard))


@contextlib.contextmanager
def shown(units: list[Any], values: list[tuple[Entry, torch.Tensor]]) -> Iterator[None]:
    """Within it parameters have these values, and modules list them instead of shards
    or views; afterwards they are views of the units' memory again."""
    homes = [(entry, entry.param.data) for entry, _ in values]
    states = [(unit, unit.training_state) for unit in units]
    tables = _tables(units)
    try:
        for entry, value in values:
            entry.param.data = value
        _list_parameters(units)
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        for entry, home in homes:
            entry.param.data = home
        for unit, state in states:
            for place, param in _places(unit):
                object.__setattr__(place.module, place.name, param)
            unit.training_state = state
            unit._unit.release()


def _places(unit: Any) -> Iterator[tuple[Place, torch.nn.Parameter]]:
    """The places of the unit's parameters, borrowed ones included."""
    for group in unit._groups:
        for entry in group.entries:
            yield from ((place, entry.param) for place in entry.places)
    yield from unit.borrowed


def _tables(units: list[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The modules' tables of parameters, and copies of them."""
    modules = [place.module for unit in units for place, _ in _places(unit)]
    tables = {id(m._parameters): m._parameters for m in (*units, *modules)}
    return [(table, dict(table)) for table in tables.values()]


def _list_parameters(units: list[Any]) -> None:
    for unit in units:
        for shard in unit.sharded_params:
            unit._parameters.pop(shard._name, None)
        for place, param in _places(unit):
            place.module._parameters[place.name] = param
        unit.training_state = TrainingState.SUMMON_FULL_PARAMS


def _check_kept(units: list[Any]) -> None:
    for unit in units:
        for place, param in _places(unit):
            if getattr(place.module, place.name, None) is not param:
                raise RuntimeError(
                    f"{place.path} was replaced in summon_full_params(): write values "
                    "into the parameter that is there"
                )


def names_of(root: Any) -> dict[int, list[str]]:
    """The names of each parameter before wrapping, the first place first."""
    found: dict[int, list[str]] = {}
    for name, unit in root.named_modules(remove_duplicate=False):
        for place, param in _places(unit) if is_unit(unit) else ():
            path = shard_files.original_name(shard_files.join(name, place.path))
            found.setdefault(id(param), []).append(path)
    return found


def values_of(units: list[Any]) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Each parameter with all its values, a group at a time. Collective."""
    for unit, group, shard in groups_of(units):
        shown = unit.training_state is TrainingState.SUMMON_FULL_PARAMS
        full = None if shown else gathered(unit, group, shard)
        for entry in group.entries:
            yield entry, entry.param.detach() if full is None else view_of(full, entry)


def state_dict(
    root: Any, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> dict[str, torch.Tensor]:
    """The unwrapped module's, with copies of one group after the other. Collective."""
    names, state = names_of(root), dict[str, torch.Tensor]()
    for entry, value in values_of(root.units()):
        state.update(dict.fromkeys(names[id(entry.param)], copy(value)))
    for name, buffer in persistent_buffers(root):
        dtype = getattr(buffer, "_orig_dtype", buffer.dtype)
        state[name] = buffer.detach().to(dtype, copy=True)
    return state


def empty_state(root: Any) -> dict[str, torch.Tensor]:
    """The names of state_dict(), with tensors of their shapes and no memory."""
    names, state = names_of(root), dict(persistent_buffers(root))
    for entry in entries_of(root.units()):
        empty = torch.empty(entry.param.shape, dtype=entry.dtype, device="meta")
        state.update(dict.fromkeys(names[id(entry.param)], empty))
    return state


def persistent_buffers(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for module_name, module in root.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                path = shard_files.join(module_name, name)
                yield shard_files.original_name(path), buffer


def load_state_dict(
    root: Any, units: list[Any], state: dict[str, Any], strict: bool
) -> None:
    names = names_of(root)
    buffers = dict(persistent_buffers(root))
    check(names, units, buffers, state, strict)
    with torch.no_grad():
        for unit, group, shard in groups_of(units):
            load_group(unit, group, shard, names, state)
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name])
    for unit in units:
        unit._unit.release()


def load_group(
    unit: Any,
    group: Group,
    shard: torch.Tensor,
    names: dict[int, list[str]],
    state: dict[str, Any],
) -> None:
    """Copies this rank's part of each parameter."""
    flat, begin = shard.detach().view(-1), unit.rank * shard.numel()
    for entry in group.entries:
        found = [state[name] for name in names[id(entry.param)] if name in state]
        own, whole = entry.overlap(begin, shard.numel())
        if found and own.start < own.stop:
            flat[own] = found[0].detach().reshape(-1)[whole]


def check(
    names: dict[int, list[str]],
    units: list[Any],
    buffers: dict[str, torch.Tensor],
    state: dict[str, Any],
    strict: bool,
) -> None:
    shapes = {n: e.param.shape for e in entries_of(units) for n in names[id(e.param)]}
    shapes.update({name: buffer.shape for name, buffer in buffers.items()})
    wrong = [
        f"{name} has shape {tuple(state[name].shape)}, expected {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and state[name].shape != shape
    ]
    missing = sorted(set(shapes) - set(state)) if strict else []
    unknown = sorted(set(state) - set(shapes)) if strict else []
    if wrong or missing or unknown:
        raise RuntimeError(
            f"Error(s) in loading a full state_dict: {'; '.join(wrong)} "
            f"Missing key(s): {missing}. Unexpected key(s): {unknown}."
        )
