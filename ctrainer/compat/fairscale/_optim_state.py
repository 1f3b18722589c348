"""An optimizer's state over shards, to that of whole parameters and back."""

from __future__ import annotations

import math
from typing import Any

import torch

State = dict[str, Any]


def is_singleton_tensor(x: Any) -> bool:
    """Whether x is a tensor of no dimension, as a count of steps is."""
    return isinstance(x, torch.Tensor) and x.dim() == 0


def _shards_of(module: Any) -> list[tuple[Any, Any, torch.nn.Parameter]]:
    """(unit, group, shard) in the order of module.parameters()."""
    return [
        (unit, group, shard)
        for unit in module.units()
        for group, shard in zip(unit._groups, unit.sharded_params, strict=True)
    ]


def _numbers_of(module: Any) -> list[list[int]]:
    """The numbers of each shard's parameters."""
    numbers, at = [], 0
    for _, group, _ in _shards_of(module):
        numbers.append(list(range(at, at + len(group.entries))))
        at += len(group.entries)
    return numbers


def gather(module: Any, optim: torch.optim.Optimizer) -> State | None:
    """See FullyShardedDataParallel.gather_full_optim_state_dict."""
    shards, numbers = _shards_of(module), _numbers_of(module)
    place = {id(shard): i for i, (_, _, shard) in enumerate(shards)}
    whole: dict[int, State] = {}
    for i, (unit, group, shard) in enumerate(shards):
        for name, value in optim.state.get(shard, {}).items():
            parts = _whole_values(unit, group, shard, name, value)
            for number, part in zip(numbers[i], parts, strict=True):
                whole.setdefault(number, {})[name] = part
    groups = []
    for given in optim.param_groups:
        unknown = [p for p in given["params"] if id(p) not in place]
        if unknown:
            raise ValueError(
                f"a parameter of the optimizer, of shape {tuple(unknown[0].shape)}, "
                "is no shard of this module: make it of module.parameters()"
            )
        options = {key: v for key, v in given.items() if key != "params"}
        own = [n for p in given["params"] for n in numbers[place[id(p)]]]
        groups.append(options | {"params": own})
    if module.rank != 0:
        return None
    return {
        "state": dict(sorted(whole.items())),
        "param_groups": groups,
        "param_id_map": {n: i for i, own in enumerate(numbers) for n in own},
        "uncollected_local_ids": [],
    }


def _whole_values(
    unit: Any, group: Any, shard: torch.Tensor, name: str, value: Any
) -> list[Any]:
    """A value of the state for each parameter of the group, on rank 0."""
    if isinstance(value, torch.Tensor) and value.shape == shard.shape:
        full = torch.empty(group.size, dtype=value.dtype)
        unit.communicator.all_gather(full, value.detach().cpu().reshape(-1))
        if unit.rank != 0:
            return [None] * len(group.entries)
        return [
            full[e.at : e.at + e.numel].view(e.param.shape).clone()
            for e in group.entries
        ]
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        raise ValueError(
            f"the optimizer's {name!r} has shape {tuple(value.shape)}, its shard "
            f"{tuple(shard.shape)}: it cannot be put together"
        )
    copies = len(group.entries)
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu().clone() for _ in range(copies)]
    return [value] * copies


def shard(module: Any, full: State) -> State:
    """See FullyShardedDataParallel.get_shard_from_optim_state_dict."""
    shards, numbers = _shards_of(module), _numbers_of(module)
    known = {n for own in numbers for n in own}
    if known != set(full["param_id_map"]):
        raise AssertionError(
            f"Including itself, this model has {len(shards)} nested instances with "
            f"{len(known)} parameters. When the optimizer state was saved there were "
            f"{len(full['param_id_map'])} parameters"
        )
    state = {}
    for i, (unit, group, own) in enumerate(shards):
        states = [full["state"].get(number) for number in numbers[i]]
        if states[0] is not None:
            state[i] = {
                name: _part(unit, group, own, [s[name] for s in states])
                for name in states[0]
            }
    local = {n: i for i, own in enumerate(numbers) for n in own}
    groups = [
        group | {"params": list(dict.fromkeys(local[n] for n in group["params"]))}
        for group in full["param_groups"]
    ]
    extra = ("state", "param_groups", "param_id_map", "uncollected_local_ids")
    rest = {key: value for key, value in full.items() if key not in extra}
    return {**rest, "state": state, "param_groups": groups}


def _part(unit: Any, group: Any, shard: torch.Tensor, values: list[Any]) -> Any:
    """This rank's part of a value that each parameter of the group has."""
    first = values[0]
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return first
    made = torch.zeros(shard.shape, dtype=first.dtype)
    flat, begin = made.view(-1), unit.rank * math.prod(shard.shape)
    for entry, value in zip(group.entries, values, strict=True):
        low = max(begin, entry.at)
        high = min(begin + flat.numel(), entry.at + entry.numel)
        if low < high:
            own = value.reshape(-1)[low - entry.at : high - entry.at]
            flat[low - begin : high - begin] = own
    return made
