"""fairscale's format of one rank's shards: their metadata, and the whole of them."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer.fsdp.shard_files import join, original_name
from ctrainer.fsdp.shard_metadata import borrowed_info

Shards = dict[str, torch.Tensor]


def metadata(root: Any, wrapper: type) -> dict[str, Any]:
    """See FullyShardedDataParallel.local_metadata_dict."""
    units = [
        _of_unit(root, original_name(f"{name}.").rstrip("."), module)
        for name, module in root.named_modules()
        if isinstance(module, wrapper)
    ]
    for other, first in borrowed_info(root, wrapper).items():
        units[0]["shared_param_info"].append(
            (original_name(first), original_name(other))
        )
    buffers = [original_name(name) for name, _ in root.named_buffers()]
    return {"param_metadata": units, "buffer_names": buffers}


def _of_unit(root: Any, path: str, unit: Any) -> dict[str, Any]:
    return {
        "fsdp_path": path,
        "params": {
            original_name(group.name): _of_group(unit, group) for group in unit._groups
        },
        "no_broadcast_optim_state": unit.no_broadcast_optim_state
        or unit.world_size == 1 < root.world_size,
        "shared_param_info": [
            (original_name(entry.places[0].path), original_name(place.path))
            for group in unit._groups
            for entry in group.entries
            for place in entry.places[1:]
        ],
    }


def _of_group(unit: Any, group: Any) -> dict[str, Any]:
    shard = group.shard_shape.numel()
    left = group.orig_size.numel() - unit.rank * shard
    return {
        "names": [original_name(entry.places[0].path) for entry in group.entries],
        "shapes": [entry.param.size() for entry in group.entries],
        "numels": [entry.numel for entry in group.entries],
        "padding": shard - min(max(left, 0), shard),
    }


def consolidated(
    weights: list[Shards], about: list[dict[str, Any]], buffers: bool, strict: bool
) -> Shards:
    """See FullyShardedDataParallel.consolidate_shard_weights."""
    if len(weights) != len(about) or not weights:
        raise ValueError("Require metadata for each shard and non-empty shards")
    full: Shards = {}
    for number, unit in enumerate(about[0]["param_metadata"]):
        same = 1 if unit["no_broadcast_optim_state"] else len(weights)
        path = unit["fsdp_path"]
        for name in unit["params"]:
            if not _is_there(join(path, name), weights[0], strict):
                continue
            each = [a["param_metadata"][number]["params"][name] for a in about[:same]]
            shards = [shard[join(path, name)].reshape(-1) for shard in weights[:same]]
            full |= _split(path, shards, each)
    for unit in about[0]["param_metadata"]:
        for names in unit["shared_param_info"]:
            first, other = (join(unit["fsdp_path"], name) for name in names)
            if _is_there(first, full, strict):
                full[other] = full[first]
    for name in about[0]["buffer_names"] if buffers else ():
        if _is_there(name, weights[0], strict):
            full[name] = weights[0][name]
    return full


def _is_there(key: str, found: Shards, strict: bool) -> bool:
    if strict and key not in found:
        raise ValueError(
            f"{key!r} of the metadata is not in the weights: pass strict=False to "
            "leave it out"
        )
    return key in found


def _split(
    path: str, shards: list[torch.Tensor], about: list[dict[str, Any]]
) -> Shards:
    """The whole parameters in the shards of one, flat or not."""
    own = [
        shard[: shard.numel() - each["padding"]]
        for shard, each in zip(shards, about, strict=True)
    ]
    whole, numels = torch.cat(own), about[0]["numels"]
    if whole.numel() != sum(numels):
        raise ValueError(
            f"the shards of {path or 'the root'} have {whole.numel()} elements of "
            f"{about[0]['names']}, the metadata {sum(numels)}"
        )
    names, shapes = about[0]["names"], about[0]["shapes"]
    parts = zip(names, torch.split(whole, numels), shapes, strict=True)
    return {join(path, name): part.view(tuple(shape)) for name, part, shape in parts}
