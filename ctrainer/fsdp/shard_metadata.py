"""What a checkpoint of shards says about them, so that they can be put together."""

from __future__ import annotations

from typing import Any

from torch import nn

from ctrainer.fsdp.flatten import FlattenParamsWrapper


def shard_info(module: Any) -> dict[str, Any]:
    return {
        shard._name: {"_orig_size": shard._orig_size, "_orig_name": shard._orig_name}
        for shard in module.sharded_params
    }


def without_wrapper(name: str) -> str:
    """As state_dict() has it."""
    return name.replace("_fpw_module.", "")


def original_name(name: str) -> str:
    """As it was before wrapping."""
    return without_wrapper(name).replace("_fsdp_wrapped_module.", "")


def is_flat(name: str) -> bool:
    """Is it the name of a flat parameter?"""
    return name.rpartition(".")[2].startswith("flat_param_")


def buffer_info(root: nn.Module) -> dict[str, Any]:
    """The dtypes that buffers had, under the names that state_dict() gives them."""
    return {
        without_wrapper(name): {"_orig_dtype": buffer._orig_dtype}
        for name, buffer in root.named_buffers(remove_duplicate=False)
        if hasattr(buffer, "_orig_dtype")
    }


def shared_info(unit: Any, name: str, first_name: str) -> dict[str, str]:
    """The further names of tied parameters, and the first one of each.

    name: the unit's; first_name: the first that it has, where it is in several places.
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


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


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
    }
