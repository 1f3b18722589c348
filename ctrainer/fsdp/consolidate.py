"""Shards of all ranks to one state_dict, one file, or shards of another number of
ranks.

The files' data goes from file to file through one block of memory in C; what is held
of it in Python are names, shapes and offsets.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ctrainer.checkpoint.disk import write_together
from ctrainer.checkpoint.files import unchanged
from ctrainer.fsdp import shard_files
from ctrainer.fsdp.shard_files import (
    Cut,
    Part,
    Shard,
    check_none_is_replaced,
    check_optimizer,
    division_of,
    find_shards,
    item_of,
    original_name,
    parts_of,
    readable,
    shard_paths,
    sharded_keys,
    tensor_of,
)
from ctrainer.fsdp.stored import ITEM_BYTES, Item, Stored, joined
from ctrainer.runtime.command_line import HelpFormatter

# Optimizer states of shards: to those of whole parameters, and to other shards.


State = dict[str, Any]

# The numbers that 8-bit values stand for, by the values' keys.
MAPS = {"state1": "qmap1", "state2": "qmap2"}
# What is the same on all ranks, of whatever shape: these numbers, and what Adafactor
# keeps of a whole parameter.
OF_WHOLE = frozenset({*MAPS.values(), "exp_avg_sq_row", "exp_avg_sq_col"})
# Elements of a parameter that share a scale, by the scales' keys.
BLOCKS = {"absmax1": 256, "absmax2": 256, "exp_avg_scale": 32, "exp_avg_sq_scale": 32}


@dataclass(frozen=True, slots=True)
class Owned:
    """What a parameter of an optimizer is of: of the shards `key` all elements, or
    those of one whole parameter, [begin, end) of the ranks' shards laid end to end."""

    key: str
    parts: tuple[Part, ...]  # the whole parameters in it, each once
    begin: int = 0
    end: int | None = None  # None: all

    def span(self, first: int, numel: int) -> tuple[int, int]:
        """What of it is in elements [first, first + numel), counted from begin."""
        last = first + numel if self.end is None else min(first + numel, self.end)
        low = max(first, self.begin)
        return low - self.begin, max(low, last) - self.begin

    def lengths(self, shards: list[Shard]) -> list[int]:
        """How many elements each rank has of it."""
        numel = shards[0].model[self.key].numel
        spans = [self.span(rank * numel, numel) for rank in range(len(shards))]
        return [end - begin for begin, end in spans]


def owned_by(shard: Shard) -> dict[int, Owned]:
    """The parameter of each index of the optimizer's state.

    By `param_names` in the groups, as torch writes them for an optimizer made of named
    parameters: keys of the model's state_dict, or names of whole parameters, of which
    the optimizer has this rank's part. Else by order, if there are as many as the model
    has shards.

    Raises ValueError if neither is possible.
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
            f"{len(groups)} groups, the model {len(keys)}, in no known "
            "order: make the optimizer of named_parameters(), so that its groups have "
            "param_names"
        )
    known = _all_owned(shard)
    keys = [key if key in known else original_name(key) for key in keys]
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(f"{shard.path}: the model has no parameter {unknown[0]!r}")
    return {i: known[key] for i, key in zip(indices, keys, strict=True)}


def _first_keys(shard: Shard) -> list[str]:
    """Of a unit in several places only the shards under the first: an optimizer has
    them once."""
    shared = shard.metadata.get("shared_info", {})
    others = {original_name(name) for name in shared}
    named = {part.key for part in shard.parts() if part.name not in others}
    return [key for key in sharded_keys(shard.model) if key in named]


def _all_owned(shard: Shard) -> dict[str, Owned]:
    """By the keys of shards and by the names of whole parameters."""
    parts: dict[str, list[Part]] = {key: [] for key in shard.model}
    found = {}
    for part in shard.parts():
        known = parts[part.key]
        if part.begin is None or part.begin not in [p.begin for p in known]:
            known.append(part)  # and not another name of one
        if part.begin is not None:
            end = part.begin + part.numel
            found[part.name] = Owned(part.key, (part,), part.begin, end)
    shards = {key: Owned(key, tuple(inside)) for key, inside in parts.items()}
    flat = {readable(key): one for key, one in shards.items()}
    return flat | found | shards


def consolidate_optimizers(shards: list[Shard]) -> State:
    """{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}, of whole
    parameters by the names that they have without wrappers.

    Raises ValueError where a shard has no optimizer, or they do not fit.
    """
    _check_there(shards)
    owned = owned_by(shards[0])
    state: State = {}
    for index, values in _states(shards, owned):
        for part in owned[index].parts:
            state[part.name] = {
                name: _whole(found, owned[index], part)
                for name, found in values.items()
            }
    names = {i: [part.name for part in one.parts] for i, one in owned.items()}
    return {"state": state, "param_groups": _groups(shards[0], names)}


def reshard_optimizers(shards: list[Shard], cuts: Mapping[str, Cut]) -> State | None:
    """The state of one rank's shards, `cuts` by key; None without any state."""
    if all(shard.optimizer is None for shard in shards):
        return None
    _check_there(shards)
    owned = owned_by(shards[0])
    state: dict[int, State] = {}
    for index, values in _states(shards, owned):
        one = owned[index]
        cut = cuts[one.key]
        state[index] = {name: _cut(found, one, cut) for name, found in values.items()}
    optimizer = shards[0].optimizer
    assert optimizer is not None
    names = {i: [_name_in_groups(one)] for i, one in owned.items()}
    groups = _groups(shards[0], names)
    for group, given in zip(groups, optimizer["param_groups"], strict=True):
        group["param_names"], group["params"] = group["params"], given["params"]
    return {"state": state, "param_groups": groups}


def _name_in_groups(owned: Owned) -> str:
    return owned.key if owned.end is None else owned.parts[0].name


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
    parameter. Without optimizers, or steps, there is no such check."""
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
        stored = [value for value in values.values() if isinstance(value, Stored)]
        without = any(value.numel == 0 for value in stored)  # any part of it
        if step is None or without or (isinstance(step, Stored) and step.numel > 1):
            continue
        yield index, _plain_value(step)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A value of a parameter's state that was sharded with it: each rank's part, in
    rows, as 8-bit AdEMAMix has two, of a number for each `block` elements."""

    stored: list[Stored]
    ends: tuple[int, ...]  # of the parts but the last, in elements
    rows: int | None  # None: one, which is no dimension of the value
    block: int
    zero: int  # the byte of a 0
    where: str

    def item(
        self, begin: int, shape: tuple[int, ...], n: int, total: int | None = None
    ) -> Item:
        """What there is of n elements from `begin` on, which have this shape; what is
        beyond `total` is zero.

        Raises ValueError where blocks are cut.
        """
        if any(cut % self.block for cut in (begin, *self.ends)):
            raise ValueError(
                f"the optimizer's state of {self.where} has a scale for each "
                f"{self.block} elements, and parameters are cut between others: it "
                f"cannot be put together; shards of block_size={self.block} can"
            )
        first, values = begin // self.block, -(-n // self.block)
        most = None if total is None else -(-total // self.block)
        excerpts = [
            excerpt
            for row in range(self.rows or 1)
            for excerpt in joined(self._row(row), first, values, most)
        ]
        own = shape if self.block == 1 else (values,)
        whole = own if self.rows is None else (self.rows, *own)
        item = Item(self.stored[0].tag, whole, tuple(excerpts))
        if self.zero and any(path is None for path, *_ in excerpts):
            return replace(item, data=item.read(self.zero))
        return item

    def _row(self, row: int) -> list[Stored]:
        found = []
        for part in self.stored:
            n = part.numel // (self.rows or 1)
            offset = part.offset + row * n * ITEM_BYTES[part.tag]
            found.append(replace(part, offset=offset, shape=(n,)))
        return found


# A value of a parameter's state: the parts of all ranks, or what is the same on each.
Found = _Parts | Any


def _states(
    shards: list[Shard], owned: Mapping[int, Owned]
) -> list[tuple[int, dict[str, Found]]]:
    optimizers = [shard.optimizer for shard in shards]
    states = [o["state"] for o in optimizers if o is not None]
    unknown = sorted({index for state in states for index in state} - owned.keys())
    if unknown:
        raise ValueError(
            f"{shards[0].path}: its optimizer has a state of parameter {unknown[0]}, "
            "which is in none of its groups"
        )
    found = []
    for index, one in owned.items():
        holders = _holders(one, shards)
        there = [index in states[rank] for rank in holders]
        if any(there) and not all(there):
            raise ValueError(
                f"{shards[holders[there.index(False)]].path}: its optimizer has states "
                "of other parameters than that of "
                f"{shards[holders[there.index(True)]].path}"
            )
        if all(there):
            own = [states[rank][index] for rank in holders]
            found.append((index, _values(shards, holders, own, one)))
    return found


def _holders(owned: Owned, shards: list[Shard]) -> list[int]:
    """The ranks with elements of it; an optimizer must have skipped none of these."""
    lengths = owned.lengths(shards)
    return [r for r, n in enumerate(lengths) if n > 0] or list(range(len(shards)))


def _values(
    shards: list[Shard], holders: list[int], states: list[State], owned: Owned
) -> dict[str, Found]:
    """The values that the holders' states have for a parameter."""
    found = {}
    having = [shards[rank] for rank in holders]
    lengths = owned.lengths(shards)
    shapes = [_shape(owned, shards[r].model[owned.key], lengths[r]) for r in holders]
    readable_name = readable(_name_in_groups(owned))
    for name, value in states[0].items():
        values = [state.get(name) for state in states]
        where = f"{readable_name!r}, {name!r},"
        if name in OF_WHOLE and isinstance(value, Stored):
            alike = [value.shape] * len(having)
            found[name] = item_of(_alike(having, values, alike, where)[0])
            continue
        block = BLOCKS.get(name, 1)
        scales: list[tuple[int, ...]] = [(-(-lengths[r] // block),) for r in holders]
        own = shapes if block == 1 else scales
        more = value.shape[: -len(own[0])] if isinstance(value, Stored) else ()
        if isinstance(value, Stored) and value.shape in (own[0], (*more[:1], *own[0])):
            parts = _alike(having, values, [(*more, *shape) for shape in own], where)
            ends = tuple(itertools.accumulate(lengths[r] for r in holders))[:-1]
            rows = more[0] if more else None
            zero = _zero_of(name, states[0])
            found[name] = _Parts(parts, ends, rows, block, zero, where)
        else:
            found[name] = _same(having, values, where)
    return found


def _zero_of(name: str, values: State) -> int:
    found = values.get(MAPS.get(name, ""))
    return zero_in(tensor_of(item_of(found))) if isinstance(found, Stored) else 0


def zero_in(numbers: torch.Tensor) -> int:
    """The 8-bit value that stands for 0, of the numbers that all of them stand for."""
    return int((numbers.reshape(-1) == 0).to(torch.uint8).argmax())


def _shape(owned: Owned, shard: Stored, numel: int) -> tuple[int, ...]:
    """What a rank has of it: the shard, or so many elements of it, by rows where it has
    rows."""
    if owned.end is None:
        return shard.shape
    rest = shard.shape[1:]
    return (numel // math.prod(rest) if math.prod(rest) else 0, *rest)


def _alike(
    shards: list[Shard], values: list[Any], shapes: list[Any], where: str
) -> list[Stored]:
    first = values[0]
    for shard, value, shape in zip(shards, values, shapes, strict=True):
        if not isinstance(value, Stored) or (value.tag, value.shape) != (
            first.tag,
            shape,
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


def _whole(found: Found, owned: Owned, part: Part) -> Any:
    if not isinstance(found, _Parts):
        return found
    assert part.begin is not None
    return found.item(part.begin - owned.begin, part.shape, part.numel)


def _cut(found: Found, owned: Owned, cut: Cut) -> Any:
    if not isinstance(found, _Parts):
        return found
    begin, end = owned.span(cut.begin, cut.numel)
    shape, total = cut.shape, cut.total
    if owned.end is not None:
        rows = math.prod(cut.shape[1:])
        shape = ((end - begin) // rows if rows else 0, *cut.shape[1:])
        total = owned.end - owned.begin
    return found.item(begin, shape, end - begin, total)


logger = logging.getLogger("ctrainer.fsdp")

StateDict = dict[str, torch.Tensor]


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[StateDict], shard_metadata: dict[str, Any]
) -> StateDict:
    """Return the state_dict of the module that was wrapped, of the ranks' sharded ones.

    Args:
        state_dict_list (Sequence[StateDict]): state_dict() of every rank, by rank.
        shard_metadata (dict[str, Any]): get_shard_metadata() of any of them.

    Returns:
        Tensors by the names that they have without wrappers; buffers have their own
        dtype again, and a tied parameter is there under each of its names.

    Raises:
        ValueError: other than the metadata's world_size state_dicts are given; or
            names, shapes and metadata do not fit.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FullyShardedDataParallel
        >>> from ctrainer.fsdp import consolidate_sharded_state_dicts
        >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 2))
        >>> shards, metadata = [model.state_dict()], model.get_shard_metadata()
        >>> consolidate_sharded_state_dicts(shards, metadata)["weight"].shape
        torch.Size([2, 4])
    """
    expected = int(shard_metadata["world_size"])
    if len(state_dict_list) != expected:
        raise ValueError(
            f"expected the state_dicts of {expected} ranks (world_size in the "
            f"metadata), got {len(state_dict_list)}"
        )
    return _by_name(
        parts_of(state_dict_list[0], shard_metadata),
        lambda part: _join_tensors([s[part.key] for s in state_dict_list], part),
    )


def _by_name(parts: list[Part], make: Callable[[Part], Any]) -> OrderedDict[str, Any]:
    """What is made of each part; names of a tied parameter have the same object."""
    made: dict[tuple[str, int | None], Any] = {}
    full = OrderedDict()
    for part in parts:
        place = part.key, part.begin
        if place not in made:
            made[place] = make(part)
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
) -> tuple[StateDict, str | None]:
    """Make one state_dict of the shard files ckpt_prefix + ckpt_suffix, and save it as
    one file.

    Args:
        ckpt_prefix (str): With ckpt_suffix a glob pattern of the files, one of each
            rank, each {"model": state_dict(), "shard_metadata": get_shard_metadata()}
            of torch.save, or a safetensors file of `save_shard`.
        ckpt_suffix (str, default '*.pth'): The end of that pattern.
        save_path (str, default ''): A ".safetensors" file of the tensors, or else
            torch.save's {"model": ...}; ckpt_prefix + "_consolidated.pth" if empty.
        save_model (bool, default True): Write the file; False: only return the
            state_dict, and None for the path.
        save_optimizer (bool, default False): Write the optimizer's state, too, by the
            parameters' names: under "optimizer" in the file, or beside a safetensors
            file as "NAME.optimizer.safetensors".

    Returns:
        The state_dict and the path. With `save_model` the tensors are mapped from the
        file, so they take no memory until used; without, they are read.

    Raises:
        AssertionError: no files, or not one of each rank.
        ValueError: a file is damaged, of another save or none of shards, would be
            replaced by the result, or was changed while it was read; the message names
            it.
        OSError: of the disk. What was at save_path is still there after any error.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FullyShardedDataParallel, save_shard
        >>> from ctrainer.fsdp import consolidate_sharded_model_checkpoints
        >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 2))
        >>> metadata = model.get_shard_metadata()
        >>> content = {"model": model.state_dict(), "shard_metadata": metadata}
        >>> save_shard(content, "run-rank-0-of-1.pth")
        >>> state, path = consolidate_sharded_model_checkpoints("run")
        >>> state["weight"].shape, path
        (torch.Size([2, 4]), 'run_consolidated.pth')
    """
    path = save_path or f"{ckpt_prefix}_consolidated.pth"
    results = [path, shard_files.optimizer_path(path)]
    with unchanged(*shard_paths(ckpt_prefix, ckpt_suffix, results)) as check:
        shards = find_shards(ckpt_prefix, ckpt_suffix, results)
        check_none_is_replaced(shards, results)
        items = _by_name(shards[0].parts(), partial(_full_item, shards))
        optimizer = None
        if save_optimizer:
            optimizer = consolidate_optimizers(shards)
        else:
            check_same_update(shards)
        if not save_model:
            read = ((name, shard_files.tensor_of(i)) for name, i in items.items())
            return OrderedDict(read), None
        shard_files.write_full(path, items, optimizer, check)
    logger.info("%d shards are consolidated in %s", len(shards), path)
    return shard_files.open_full(path), path


def _full_item(shards: list[Shard], part: Part) -> Item:
    stored = [shard.model[part.key] for shard in shards]
    if part.begin is None:
        return shard_files.cast(shard_files.item_of(stored[0]), part.dtype)
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

    The new files are save_prefix + "-rank-R-of-N" with the old ones' ending; each rank
    loads its own. Padding, division by rows or elements and dtypes are as they were.
    What the ranks saved alike under other keys is in all of them.

    Args:
        ckpt_prefix, ckpt_suffix (str): Together a glob pattern of the old files, one of
            each rank.
        world_size (int): Ranks that will load the new files, 1 or more.
        save_prefix (str): Beginning of the new files' paths.

    Returns:
        Their paths, by rank.

    Raises:
        ValueError: a world_size below 1, and as consolidate_sharded_model_checkpoints.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FullyShardedDataParallel, reshard_checkpoints
        >>> from ctrainer.fsdp import save_shard
        >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 2))
        >>> metadata = model.get_shard_metadata()
        >>> content = {"model": model.state_dict(), "shard_metadata": metadata}
        >>> save_shard(content, "old-rank-0-of-1.pth")
        >>> reshard_checkpoints("old", world_size=2, save_prefix="new")
        ['new-rank-0-of-2.pth', 'new-rank-1-of-2.pth']
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
            shard_files.write_shard(path, one_shard(shards, rank, world_size) | more)

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
        (key, shard_files.item_of(stored)) for key, stored in first.model.items()
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
    """`ctrainer consolidate`."""
    parser = argparse.ArgumentParser(
        prog="ctrainer consolidate",
        description="Make one file, or other shards, of the shard files of FSDP.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--ckpt_prefix",
        required=True,
        help="Beginning of the shard files' paths.",
    )
    parser.add_argument("--ckpt_suffix", default="*.pth", help="Pattern of the rest.")
    parser.add_argument(
        "--save_path",
        default="",
        help="File to write, .safetensors or .pth; with --world_size, what the "
        "paths of the new shards begin with.",
    )
    parser.add_argument(
        "--world_size", type=int, help="Write shards for so many ranks."
    )
    parser.add_argument(
        "--optimizer",
        action="store_true",
        help="Write the optimizer's state; shards always have it.",
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
