"""Shards of all ranks to one state_dict, one file, or shards of another number of
ranks.

The files' data goes from file to file through one block of memory in C; what is held
of it in Python are names, shapes and offsets.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ctrainer.checkpoint.files import unchanged
from ctrainer.fsdp import _files
from ctrainer.fsdp._optimizer_state import (
    check_same_update,
    consolidate_optimizers,
    reshard_optimizers,
)
from ctrainer.fsdp._shard_layout import Part, division_of, parts_of, sharded_keys
from ctrainer.fsdp._shard_set import (
    check_none_is_replaced,
    find_shards,
    shard_paths,
)
from ctrainer.fsdp._shards import Shard
from ctrainer.fsdp._stored import Item, joined
from ctrainer.fsdp._together import write_together

logger = logging.getLogger("ctrainer.fsdp")

StateDict = dict[str, torch.Tensor]


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[StateDict], shard_metadata: dict[str, Any]
) -> StateDict:
    """The state_dict of the module that was wrapped, of the ranks' sharded ones.

    Args:
        state_dict_list: state_dict() of every rank, by rank.
        shard_metadata: get_shard_metadata() of any of them.

    Returns:
        Tensors by the names that they have without wrappers; buffers have their own
        dtype again, and a tied parameter is there under each of its names.

    Raises:
        ValueError: as many state_dicts as the metadata's world_size are needed; or
            names, shapes and metadata do not fit.
    """
    expected = int(shard_metadata["world_size"])
    if len(state_dict_list) != expected:
        raise ValueError(
            f"expected the state_dicts of {expected} ranks (world_size in the "
            f"metadata), got {len(state_dict_list)}"
        )
    made: dict[tuple[str, int | None], torch.Tensor] = {}
    full: StateDict = OrderedDict()
    for part in parts_of(state_dict_list[0], shard_metadata):
        place = part.key, part.begin
        if place not in made:
            made[place] = _join_tensors([s[part.key] for s in state_dict_list], part)
        full[part.name] = made[place]
    return full


def _join_tensors(shards: list[torch.Tensor], part: Part) -> torch.Tensor:
    if part.begin is None:
        dtype = shards[0].dtype if part.dtype is None else getattr(torch, part.dtype)
        return shards[0].to(dtype)
    end = part.begin + part.numel
    pieces, at = [], 0
    for shard in shards:
        first, last = max(part.begin - at, 0), min(end - at, shard.numel())
        if first < last:
            pieces.append(shard.reshape(-1)[first:last])
        at += shard.numel()
    if at < end:
        raise ValueError(
            f"{part.name!r} needs {end} elements of {part.key!r}; the ranks have {at}"
        )
    return (
        torch.cat(pieces).view(part.shape)
        if pieces
        else shards[0].new_empty(part.shape)
    )


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = "*.pth",
    save_path: str = "",
    save_model: bool = True,
    *,
    save_optimizer: bool = False,
) -> tuple[StateDict, str]:
    """One state_dict of the shard files ckpt_prefix + ckpt_suffix, saved as one file.

    Args:
        ckpt_prefix, ckpt_suffix: together a glob pattern of the files, one of each
            rank, each {"model": state_dict(), "shard_metadata": get_shard_metadata()}
            of torch.save, or a safetensors file of `save_sharded_checkpoint`.
        save_path: a ".safetensors" file of the tensors, or else torch.save's
            {"model": ...}; ckpt_prefix + "_consolidated.pth" if empty.
        save_optimizer: also the optimizer's state, by the parameters' names: under
            "optimizer" in the file, or beside a safetensors file as
            "NAME.optimizer.safetensors".

    Returns:
        The state_dict and the path. With `save_model` the tensors are mapped from the
        file, so they take no memory until used; without, they are read.

    Raises:
        AssertionError: no files, or not one of each rank.
        ValueError: a file is damaged, of another save or none of shards, would be
            replaced by the result, or was changed while it was read; named.
        OSError: of the disk. What was at save_path is still there after any error.
    """
    path = save_path or f"{ckpt_prefix}_consolidated.pth"
    results = [path, _files.optimizer_path(path)]
    with unchanged(*shard_paths(ckpt_prefix, ckpt_suffix, results)) as check:
        shards = find_shards(ckpt_prefix, ckpt_suffix, results)
        check_none_is_replaced(shards, results)
        items = _full_items(shards)
        optimizer = None
        if save_optimizer:
            optimizer = consolidate_optimizers(shards)
        else:
            check_same_update(shards)
        if not save_model:
            return OrderedDict((n, _files.tensor_of(i)) for n, i in items.items()), path
        _files.write_full(path, items, optimizer, check)
    logger.info("%d shards are consolidated in %s", len(shards), path)
    return _files.open_full(path), path


def _full_items(shards: list[Shard]) -> dict[str, Item]:
    first = shards[0]
    made: dict[tuple[str, int | None], Item] = {}
    full: dict[str, Item] = OrderedDict()
    for part in first.parts():
        place = part.key, part.begin
        if place not in made:
            made[place] = _full_item(shards, part)
        full[part.name] = made[place]
    return full


def _full_item(shards: list[Shard], part: Part) -> Item:
    stored = [shard.model[part.key] for shard in shards]
    if part.begin is None:
        return _files.cast(_files.item_of(stored[0]), part.dtype)
    if sum(s.numel for s in stored) < part.begin + part.numel:
        raise ValueError(
            f"{part.name!r} needs {part.begin + part.numel} elements of "
            f"{part.key!r}; the files have {sum(s.numel for s in stored)}"
        )
    excerpts = joined(stored, part.begin, part.numel)
    return Item(stored[0].tag, part.shape, excerpts)


# Shards for another number of ranks


def reshard_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", *, world_size: int, save_prefix: str
) -> list[str]:
    """Write the shards, and optimizer states, that `world_size` ranks would have saved.

    The new files are save_prefix + "-rank-R-of-N" with the old ones' ending; each
    rank loads its own. Padding, division by rows or elements and dtypes are as they
    were. What the ranks saved alike under other keys is in all of them.

    Returns:
        Their paths, by rank.

    Raises:
        As consolidate_sharded_model_checkpoints; ValueError also for a world_size
        below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more, got {world_size}")
    with unchanged(*shard_paths(ckpt_prefix, ckpt_suffix)) as check:
        shards = find_shards(ckpt_prefix, ckpt_suffix)
        ending = os.path.splitext(shards[0].path)[1]
        paths = [
            f"{save_prefix}-rank-{rank}-of-{world_size}{ending}"
            for rank in range(world_size)
        ]
        check_none_is_replaced(shards, paths)
        more = _agreed(shards)

        def write(rank: int, path: str) -> None:
            _files.write_shard(path, one_shard(shards, rank, world_size) | more)

        writers = {path: partial(write, rank) for rank, path in enumerate(paths)}
        write_together(writers, check)
    return paths


def _agreed(shards: list[Shard]) -> dict[str, Any]:
    """What all ranks have saved alike under keys of its own, such as a step."""
    agreed = {
        key: value
        for key, value in shards[0].more.items()
        if all(shard.more.get(key) == value for shard in shards)
    }
    left = sorted({key for shard in shards for key in shard.more} - agreed.keys())
    if left:
        logger.warning("Of each rank alone, and not in the new shards: %s", left)
    return agreed


def one_shard(shards: list[Shard], rank: int, world_size: int) -> dict[str, Any]:
    """What one rank of `world_size` would have saved, with Items for tensors."""
    first = shards[0]
    first.parts()  # they fit the metadata, or an error says where not
    keys = sharded_keys(first.model)
    shapes = {key: first.model[key].shape for key in keys}
    division = division_of(shapes, first.metadata)
    model = OrderedDict(
        (key, _files.item_of(stored)) for key, stored in first.model.items()
    )
    cuts = {key: division.cut(key, first.metadata, rank, world_size) for key in keys}
    for key, cut in cuts.items():
        stored = [shard.model[key] for shard in shards]
        excerpts = joined(stored, cut.begin, cut.numel, cut.total)
        model[key] = Item(stored[0].tag, cut.shape, excerpts)
    metadata = first.metadata | {"world_size": world_size, "rank": rank}
    metadata["shard_param_on_dim_0"] = division.by_rows
    metadata["shard_size_multiple"] = division.multiple
    optimizer = reshard_optimizers(shards, cuts)
    return {"model": model, "shard_metadata": metadata, "optimizer": optimizer}


# The command


def main(arguments: list[str]) -> int:
    """`python -m ctrainer consolidate`."""
    parser = argparse.ArgumentParser(prog="python -m ctrainer consolidate")
    parser.add_argument("--ckpt_prefix", required=True, help="beginning of the files")
    parser.add_argument("--ckpt_suffix", default="*.pth", help="the rest, a pattern")
    parser.add_argument(
        "--save_path",
        default="",
        help="the file, .safetensors or .pth; with --world_size what the shards' "
        "names begin with",
    )
    parser.add_argument("--world_size", type=int, help="write shards for so many ranks")
    parser.add_argument(
        "--optimizer", action="store_true", help="its state, too (shards always have)"
    )
    given = parser.parse_args(arguments)
    try:
        print(_run(given))
    except (AssertionError, ValueError, OSError) as problem:
        parser.exit(1, f"{parser.prog}: {problem}\n")
    return 0


def _run(given: argparse.Namespace) -> str:
    prefix, suffix, path = given.ckpt_prefix, given.ckpt_suffix, given.save_path
    if given.world_size is None:
        _, written = consolidate_sharded_model_checkpoints(
            prefix, suffix, path, save_optimizer=given.optimizer
        )
        return f"saved to {written}"
    paths = reshard_checkpoints(
        prefix, suffix, world_size=given.world_size, save_prefix=path or prefix
    )
    return "\n".join(f"saved to {written}" for written in paths)
