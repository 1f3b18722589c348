"""Optimizer states of shards: to those of whole parameters, and to other shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ctrainer.fsdp._files import item_of, tensor_of
from ctrainer.fsdp._shard_checks import check_optimizer
from ctrainer.fsdp._shard_layout import (
    Cut,
    Part,
    original_name,
    readable,
    sharded_keys,
)
from ctrainer.fsdp._shards import Shard
from ctrainer.fsdp._stored import Item, Stored, joined

State = dict[str, Any]

# What Adafactor keeps of a whole parameter: the same on all ranks, of whatever shape.
OF_WHOLE = frozenset({"exp_avg_sq_row", "exp_avg_sq_col"})


def parameter_keys(shard: Shard) -> dict[int, str]:
    """Which tensor of the model's state_dict each index of the optimizer's is.

    By `param_names` in the groups, as torch writes them for an optimizer made of named
    parameters; else by order, if there are as many as the model has.

    Raises ValueError where neither tells.
    """
    assert shard.optimizer is not None
    groups = shard.optimizer["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    keys = _first_keys(shard)
    if all("param_names" in group for group in groups):
        names = [n for group in groups for n in group["param_names"]]
        keys = [name.replace("_fpw_module.", "") for name in names]
    elif len(groups) > 1 or len(indices) != len(keys):
        raise ValueError(
            f"{shard.path}: its optimizer has {len(indices)} parameters in "
            f"{len(groups)} groups, the model {len(keys)}, and nothing tells which is "
            "which: make the optimizer of named_parameters(), so that its groups have "
            "param_names"
        )
    unknown = [key for key in keys if key not in shard.model]
    if unknown:
        raise ValueError(f"{shard.path}: the model has no parameter {unknown[0]!r}")
    return dict(zip(indices, keys, strict=True))


def _first_keys(shard: Shard) -> list[str]:
    """Of a unit in several places only the shards under the first: an optimizer has
    them once."""
    shared = shard.metadata.get("shared_info", {})
    others = {original_name(name) for name in shared}
    named = {part.key for part in shard.parts() if part.name not in others}
    return [key for key in sharded_keys(shard.model) if key in named]


def consolidate_optimizers(shards: list[Shard]) -> State:
    """{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}, of whole
    parameters by the names that they have without wrappers.

    Raises ValueError where a shard has no optimizer, or they do not fit.
    """
    _check_there(shards)
    parts: dict[str, list[Part]] = {}
    for part in shards[0].parts():
        known = parts.setdefault(part.key, [])
        if part.begin not in [p.begin for p in known]:  # not another name of one
            known.append(part)
    keys = parameter_keys(shards[0])
    state: State = {}
    for index, values in _states(shards):
        for part in parts[keys[index]]:
            state[part.name] = {
                name: _whole(found, part) for name, found in values.items()
            }
    names = {i: [part.name for part in parts[key]] for i, key in keys.items()}
    return {"state": state, "param_groups": _groups(shards[0], names)}


def reshard_optimizers(shards: list[Shard], cuts: Mapping[str, Cut]) -> State | None:
    """The state of one rank's shards, which `cuts` tells by key; None without any."""
    if all(shard.optimizer is None for shard in shards):
        return None
    _check_there(shards)
    keys = parameter_keys(shards[0])
    state: dict[int, State] = {}
    for index, values in _states(shards):
        cut = cuts[keys[index]]
        state[index] = {name: _cut(found, cut) for name, found in values.items()}
    optimizer = shards[0].optimizer
    assert optimizer is not None
    names = {index: [key] for index, key in keys.items()}
    groups = _groups(shards[0], names)
    for group, given in zip(groups, optimizer["param_groups"], strict=True):
        group["param_names"], group["params"] = group["params"], given["params"]
    return {"state": state, "param_groups": groups}


def _check_there(shards: list[Shard]) -> None:
    without = [shard.path for shard in shards if shard.optimizer is None]
    if without:
        raise ValueError(f"{without[0]}: holds no optimizer's state")
    for shard in shards:
        check_optimizer(shard.path, shard.optimizer)
    groups = [
        [group["params"] for group in shard.optimizer["param_groups"]]
        for shard in shards
        if shard.optimizer is not None
    ]
    for shard, mine in zip(shards, groups, strict=True):
        if mine != groups[0]:
            raise ValueError(
                f"{shard.path}: its optimizer's groups are not those of "
                f"{shards[0].path}"
            )


def _groups(shard: Shard, names: Mapping[int, list[str]]) -> list[State]:
    assert shard.optimizer is not None
    return [
        {key: value for key, value in group.items() if key != "param_names"}
        | {"params": [name for index in group["params"] for name in names[index]]}
        for group in shard.optimizer["param_groups"]
    ]


def check_same_update(shards: list[Shard]) -> None:
    """Shards of one model that were saved at different times fit each other in all but
    their values: raise ValueError where the optimizers count other steps for a
    parameter. Without optimizers, or steps, there is nothing to tell them by."""
    first: dict[int, tuple[Any, Shard]] = {}
    for shard in shards:
        for index, step in _steps(shard):
            other, where = first.setdefault(index, (step, shard))
            if step != other:
                raise ValueError(
                    f"{shard.path}: its optimizer has made {step!r} steps, that of "
                    f"{where.path} {other!r}; take the files of one save"
                )


def _steps(shard: Shard) -> Iterator[tuple[int, Any]]:
    if shard.optimizer is None:
        return
    check_optimizer(shard.path, shard.optimizer)
    for index, values in shard.optimizer["state"].items():
        step = values.get("step")
        if step is not None and not (isinstance(step, Stored) and step.numel > 1):
            yield index, _plain_value(step)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A value of a parameter's state that was sharded with it: each rank's part."""

    stored: list[Stored]


# A value of a parameter's state: the parts of all ranks, or what is the same on each.
Found = _Parts | Any


def _states(shards: list[Shard]) -> list[tuple[int, dict[str, Found]]]:
    keys = parameter_keys(shards[0])
    optimizers = [shard.optimizer for shard in shards]
    states = [o["state"] for o in optimizers if o is not None]
    for shard, state in zip(shards, states, strict=True):
        if state.keys() != states[0].keys():
            raise ValueError(
                f"{shard.path}: its optimizer has states of other parameters than that "
                f"of {shards[0].path}"
            )
    unknown = sorted(states[0].keys() - keys.keys())
    if unknown:
        raise ValueError(
            f"{shards[0].path}: its optimizer has a state of parameter {unknown[0]}, "
            "which is in none of its groups"
        )
    return [
        (index, _values(shards, [state[index] for state in states], keys[index]))
        for index in states[0]
    ]


def _values(shards: list[Shard], states: list[State], key: str) -> dict[str, Found]:
    found = {}
    for name, value in states[0].items():
        values = [state.get(name) for state in states]
        where = f"{readable(key)!r}, {name!r},"
        if name in OF_WHOLE and isinstance(value, Stored):
            found[name] = item_of(_alike(shards, values, where)[0])
        elif isinstance(value, Stored) and value.shape == shards[0].model[key].shape:
            found[name] = _Parts(_alike(shards, values, where))
        else:
            found[name] = _same(shards, values, where)
    return found


def _alike(shards: list[Shard], values: list[Any], where: str) -> list[Stored]:
    first = values[0]
    for shard, value in zip(shards, values, strict=True):
        if not isinstance(value, Stored) or (value.tag, value.shape) != (
            first.tag,
            first.shape,
        ):
            raise ValueError(
                f"{shard.path}: the optimizer's state of {where} is not like that of "
                f"{shards[0].path}, {first.tag} of shape {first.shape}"
            )
    return values


def _same(shards: list[Shard], values: list[Any], where: str) -> Any:
    first = values[0]
    if isinstance(first, Stored) and first.numel > 1:
        raise ValueError(
            f"{shards[0].path}: the optimizer's state of {where} has shape "
            f"{first.shape}, which is not that of the parameter's shard: it cannot be "
            "put together"
        )
    contents = [_plain_value(v) for v in values]
    for shard, content in zip(shards, contents, strict=True):
        if content != contents[0]:
            raise ValueError(
                f"{shard.path}: the optimizer's state of {where} is {content!r}, in "
                f"{shards[0].path} it is {contents[0]!r}"
            )
    return item_of(first)


def _plain_value(value: Any) -> Any:
    return tensor_of(item_of(value)).tolist() if isinstance(value, Stored) else value


def _whole(found: Found, part: Part) -> Any:
    if not isinstance(found, _Parts):
        return found
    assert part.begin is not None
    excerpts = joined(found.stored, part.begin, part.numel)
    return Item(found.stored[0].tag, part.shape, excerpts)


def _cut(found: Found, cut: Cut) -> Any:
    if not isinstance(found, _Parts):
        return found
    excerpts = joined(found.stored, cut.begin, cut.numel, cut.total)
    return Item(found.stored[0].tag, cut.shape, excerpts)
