"""The metadata of a module's shards: for checkpoints, and compared between ranks."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.fsdp.flatten import FlattenParamsWrapper
from ctrainer.fsdp.shard_files import (
    dtype_name,
    join,
    original_name,
    without_wrapper,
)


def shard_info(module: Any) -> dict[str, Any]:
    return {
        shard._name: {"_orig_size": shard._orig_size, "_orig_name": shard._orig_name}
        for shard in module.sharded_params
    }


def buffer_info(root: nn.Module) -> dict[str, Any]:
    """The dtypes that buffers had, under the names that state_dict() gives them."""
    return {
        without_wrapper(name): {"_orig_dtype": buffer._orig_dtype}
        for name, buffer in root.named_buffers(remove_duplicate=False)
        if hasattr(buffer, "_orig_dtype")
    }


def shared_info(unit: Any, name: str, first_name: str) -> dict[str, str]:
    """The further names of tied parameters, and the first name of each.

    name: the unit's; first_name: the unit's first name, if it is in several places.
    """
    return {
        other: first
        for group in unit._groups
        for entry in group.entries
        for place in entry.places
        if (other := without_wrapper(join(name, place.path)))
        != (first := without_wrapper(join(first_name, entry.places[0].path)))
    }


def borrowed_info(root: nn.Module, wrapper: type) -> dict[str, str]:
    """The names that parameters have in units which borrow them, and the owner's."""
    units: list[tuple[str, Any]] = [
        (name, module)
        for name, module in root.named_modules()
        if isinstance(module, wrapper)
    ]
    owned = {
        id(entry.param): join(name, entry.places[0].path)
        for name, unit in units
        for group in unit._groups
        for entry in group.entries
    }
    return {
        without_wrapper(join(name, place.path)): without_wrapper(owned[id(param)])
        for name, unit in units
        for place, param in unit.borrowed
        if id(param) in owned
    }


def shard_metadata(root: Any, wrapper: type) -> dict[str, Any]:
    """See FullyShardedDataParallel.get_shard_metadata."""
    shards, flats, shared = {}, {}, borrowed_info(root, wrapper)
    first_names: dict[Any, str] = {}
    for full_name, module in root.named_modules(remove_duplicate=False):
        name = without_wrapper(full_name)
        if isinstance(module, wrapper):
            shards[name] = shard_info(module)
            first_name = first_names.setdefault(module, name)
            shared.update(shared_info(module, name, first_name))
        if isinstance(module, FlattenParamsWrapper):
            for i, flat in enumerate(module.flat_param_names):
                flats[join(name.removesuffix("_fpw_module"), flat)] = module.metadata(i)
    return {
        "shard_info": shards,
        "flatten_info": flats,
        "buffer_info": buffer_info(root),
        "shared_info": shared,
        "world_size": root.world_size,
        "rank": root.rank,
        "shard_param_on_dim_0": root._sharding.on_dim_0,
        "shard_size_multiple": root._sharding.multiple,
        "block_size": root._sharding.block,
    }


# Whether all ranks have sharded the same module: compared once, before its first
# forward. Ranks that differ would mix up their data, or wait for each other.


Made = list[list[str]]  # of every unit, as _described() says

_OPTIONS = (
    "compute_dtype",
    "fp32_reduce_scatter",
    "gather_bits",
    "reduce_bits",
    "secondary_shards",
    "reshard_after_forward",
    "forward_prefetch",
    "backward_prefetch",
)  # that decide which collectives there are, and of what


def compare(root: Any, units: list[Any]) -> None:
    """Raise ValueError on all ranks, naming rank and unit, where they differ.

    Of the units those in the root's groups are compared. Collective, of 8 bytes.
    """
    groups = [root.communicator, *([root.replicas] if root.replicas else [])]
    same = [unit for unit in units if unit.communicator is root.communicator]
    if not any(unit._groups for unit in same):
        return
    made = [_described(unit) for unit in same]
    differs = [
        group for group in groups if group.world_size > 1 and _differs(group, made)
    ]
    for group in differs:
        _raise(group, made)


def _described(unit: Any) -> list[str]:
    """The unit's name, and what has to be alike of it."""
    params = "; ".join(
        f"{original_name(part.places[0].path)} {tuple(part.param.shape)}"
        + ("" if part.dtype == torch.float32 else f" {dtype_name(part.dtype)}")
        + ("" if group.requires_grad else " frozen")
        for group in unit._groups
        for part in group.entries
    )
    return [
        f"the unit {unit._unit.path!r}" if unit._unit.path else "the root",
        f"the parameters {params}" if params else "no parameters",
        f"groups of {[group.size for group in unit._groups]} elements",
        *(f"{option}={getattr(unit, option)}" for option in _OPTIONS),
    ]


def _differs(group: _C.Communicator, made: Made) -> bool:
    digest = hashlib.sha256(json.dumps(made).encode()).digest()[:8]
    word = int.from_bytes(digest, "little", signed=True)
    own = torch.tensor([word], device="cpu")
    every = torch.empty(group.world_size, dtype=own.dtype, device="cpu")
    group.all_gather(every, own)
    return bool((every != own).any())


def _raise(group: _C.Communicator, made: Made) -> None:
    answers = group.gather_bytes(json.dumps(made).encode())
    all_made: list[Made] = [json.loads(answer) for answer in answers]
    most = max(all_made, key=all_made.count)
    usual, count = all_made.index(most), all_made.count(most)
    other = next(rank for rank, made in enumerate(all_made) if made != most)
    theirs, ours = _first_difference(all_made[other], most)
    raise ValueError(
        f"ranks have sharded different modules: rank {other} has {theirs}, and rank "
        f"{usual} {ours}; {count} of {len(all_made)} ranks are with rank {usual}. All "
        "ranks have to build the same module and to wrap it alike: look for what goes "
        "by the rank in the model's configuration, its wrapping and what is frozen"
    )


def _first_difference(a: Made, b: Made) -> tuple[str, str]:
    for one, two in zip(a, b, strict=False):
        for x, y in zip(one, two, strict=True):
            if x != y:
                return _with(one, x), _with(two, y)
    first, second = (
        _with(more[len(few)], more[len(few)][1])
        if len(more) > len(few)
        else f"{len(more)} units"
        for more, few in ((a, b), (b, a))
    )
    return first, second


def _with(unit: list[str], what: str) -> str:
    return f"{unit[0]} with {unit[1] if what == unit[0] else what}"
