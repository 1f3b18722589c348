"""All values of sharded parameters: for a while, or as a state_dict."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ctrainer.fsdp import _metadata
from ctrainer.fsdp._layout import Entry, Group
from ctrainer.fsdp._sharded import ShardedModule


def gathered(unit: Any, group: Group, shard: torch.Tensor) -> torch.Tensor:
    """A group's values from all ranks, flat, of float32. Collective."""
    full = torch.empty(group.size)
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


@contextlib.contextmanager
def summoned(units: list[Any], writeback: bool) -> Iterator[None]:
    """Parameters over full tensors, and back over the units' memory."""
    fulls, homes = [], []
    before = [(unit, unit._summoned) for unit in units]
    for unit, group, shard in groups_of(units):
        full = gathered(unit, group, shard)
        fulls.append((unit, full, shard))
        for entry in group.entries:
            homes.append((entry.param, entry.param.data))
            entry.param.data = view_of(full, entry)
    try:
        for unit in units:
            unit._summoned = True
        yield
        for unit, full, shard in fulls if writeback else ():
            shard.detach().copy_(own_part(unit, full, shard))
    finally:
        for param, home in homes:
            param.data = home
        for unit, was in before:
            unit._unit.release()
            unit._summoned = was


def names_of(root: Any) -> dict[int, list[str]]:
    """The names of each parameter before wrapping, the first place first."""
    found: dict[int, list[str]] = {}
    for name, unit in root.named_modules():
        entries = [e for g in unit._groups for e in g.entries] if is_unit(unit) else []
        for entry in entries:
            paths = [_metadata.join(name, place.path) for place in entry.places]
            own = [_metadata.original_name(path) for path in paths]
            found.setdefault(id(entry), []).extend(own)
    return found


def state_dict(root: Any, units: list[Any]) -> dict[str, torch.Tensor]:
    """One group at a time is there beside the copy that is being made."""
    names, state = names_of(root), dict[str, torch.Tensor]()
    for unit, group, shard in groups_of(units):
        full = gathered(unit, group, shard)
        for entry in group.entries:
            value = view_of(full, entry).clone()
            state.update(dict.fromkeys(names[id(entry)], value))
    for name, buffer in persistent_buffers(root):
        dtype = getattr(buffer, "_orig_dtype", buffer.dtype)
        state[name] = buffer.detach().to(dtype, copy=True)
    return state


def persistent_buffers(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for module_name, module in root.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                path = _metadata.join(module_name, name)
                yield _metadata.original_name(path), buffer


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
    """Copies what of each parameter is in this rank's part."""
    parts = []
    for entry in group.entries:
        found = [state[name] for name in names[id(entry)] if name in state]
        parts += [(entry, value) for value in found[:1]]
    copy_own_parts(unit, shard, parts)


def copy_own_parts(
    unit: Any, shard: torch.Tensor, parts: list[tuple[Entry, torch.Tensor]]
) -> None:
    """Copies into a shard what it has of whole tensors, one for an entry each."""
    flat, begin = shard.detach().view(-1), unit.rank * shard.numel()
    for entry, value in parts:
        low = max(begin, entry.at)
        high = min(begin + shard.numel(), entry.at + entry.numel)
        if low < high:
            values = value.detach().reshape(-1)
            flat[low - begin : high - begin] = values[low - entry.at : high - entry.at]


def check(
    names: dict[int, list[str]],
    units: list[Any],
    buffers: dict[str, torch.Tensor],
    state: dict[str, Any],
    strict: bool,
) -> None:
    entries = [e for _, group, _ in groups_of(units) for e in group.entries]
    shapes = {n: e.param.shape for e in entries for n in names[id(e)]}
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
