"""Shard files, of the original and ours: a rank's own is written and read back,
those of one save are read as one set.
"""

from __future__ import annotations

import glob
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ctrainer import _C
from ctrainer.adapters._torch_checkpoint import DTYPES, TAGS
from ctrainer.checkpoint import Sink
from ctrainer.checkpoint.disk import SAVING, write_together
from ctrainer.checkpoint.files import naming, parse_json, unchanged
from ctrainer.checkpoint.torch_files import Pickler, archive_records
from ctrainer.fsdp.stored import (
    ARCHIVED,
    Item,
    Stored,
    read_archive,
    read_safetensors_index,
)

# Which part of which shards a tensor of the unsharded module is.
#
# Works on names and shapes alone, so that it serves tensors in memory and in files. The
# names and the metadata are those of XlaFullyShardedDataParallel (state_dict and
# get_shard_metadata), plus `shared_info` for parameters of several names.


SHARD_MARK = "_fsdp_shard"


class Part(NamedTuple):
    """A parameter: `numel` elements, from `begin` on, of the shards `key` of all ranks
    laid end to end; or a buffer, which every rank has whole (begin is None)."""

    name: str
    key: str
    begin: int | None
    shape: tuple[int, ...]
    dtype: str | None  # a buffer's own, where it was cast

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def without_wrapper(name: str) -> str:
    """As state_dict() has it."""
    return name.replace("_fpw_module.", "")


def original_name(name: str) -> str:
    """As it was before wrapping."""
    return without_wrapper(name).replace("_fsdp_wrapped_module.", "")


def readable(key: str) -> str:
    """A shard's key with what is sharded in its place, as fairscale has it."""
    dotted = key.replace("_FSDP_SHARD_SEPARATOR_", ".")
    return original_name(dotted.replace(f"{SHARD_MARK}.", ""))


def with_keys(model: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A state of shards under these keys, where it has them as fairscale does."""
    full = {readable(key): key for key in keys}
    return {full.get(key, key): value for key, value in model.items()}


def _keys_in(metadata: Metadata) -> list[str]:
    """The keys that its tables name."""
    units = metadata["shard_info"].items()
    shards = [join(path, name) for path, unit in units for name in unit]
    return shards + [without_wrapper(name) for name in metadata["buffer_info"]]


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def split_key(key: str) -> tuple[str, str] | None:
    """(path of the unit, name of its shard); None for a buffer."""
    words = key.split(".")
    at = next((i for i, word in enumerate(words) if word.startswith(SHARD_MARK)), None)
    return None if at is None else (".".join(words[:at]), ".".join(words[at:]))


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def shard_info(key: str, metadata: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The full name (wrappers included) and shape of what the shards `key` make up.

    Raises ValueError where the metadata does not know it.
    """
    place = split_key(key)
    assert place is not None
    try:
        info = metadata["shard_info"][place[0]][place[1]]
    except KeyError:
        raise ValueError(f"shard_metadata has no shard_info of {key!r}") from None
    return join(place[0], info["_orig_name"]), tuple(info["_orig_size"])


def sharded_keys(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if split_key(key) is not None]


def parts_of(keys: Iterable[str], metadata: dict[str, Any]) -> list[Part]:
    """Every tensor of the unsharded module, in the order of the state_dict's keys; a
    parameter of several names has a Part for each.

    Raises ValueError where metadata and keys do not fit.
    """
    # The original keeps "_fpw_module." in buffer_info and drops it in state_dict().
    buffers = {
        without_wrapper(name): dtype_name(info["_orig_dtype"])
        for name, info in metadata["buffer_info"].items()
    }
    found: list[Part] = []
    for key in keys:
        if split_key(key) is None:
            dtype = buffers.get(without_wrapper(key))
            found.append(Part(original_name(key), key, None, (), dtype))
        else:
            found.extend(_parameters(key, metadata))
    return _with_other_names(found, metadata)


def _parameters(key: str, metadata: dict[str, Any]) -> Iterator[Part]:
    name, shape = shard_info(key, metadata)
    flat = metadata["flatten_info"].get(without_wrapper(name))
    if flat is None:
        yield Part(original_name(name), key, 0, shape, None)
        return
    names, shapes, numels = flat
    block = metadata.get("block_size", 1)
    begins, end = [], 0
    for numel in numels:
        begins.append(math.ceil(end / block) * block)
        end = begins[-1] + numel
    if end != math.prod(shape):
        raise ValueError(
            f"shard_metadata: the parameters of {name!r} have {end} elements, "
            f"it has {math.prod(shape)}"
        )
    prefix = name.rpartition(".")[0]
    for inner, inner_shape, begin in zip(names, shapes, begins, strict=True):
        full = original_name(join(prefix, inner))
        yield Part(full, key, begin, tuple(inner_shape), None)


def _with_other_names(parts: list[Part], metadata: dict[str, Any]) -> list[Part]:
    """`shared_info`: another name of a parameter -> the first one."""
    by_name = {part.name: part for part in parts}
    for other, first in metadata.get("shared_info", {}).items():
        kept = by_name.get(original_name(first))
        if kept is None:
            raise ValueError(
                f"shard_metadata: shared_info names {first!r}, which is not there"
            )
        name = original_name(other)
        by_name.setdefault(name, kept._replace(name=name))
    return list(by_name.values())


class Cut(NamedTuple):
    """One rank's shard: elements [begin, begin + numel) of `total`, zeros beyond."""

    begin: int
    shape: tuple[int, ...]
    total: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Division(NamedTuple):
    """How parameters are divided: by rows of dim 0, or by elements, padded to a
    multiple of world_size * multiple."""

    by_rows: bool
    multiple: int

    def shape(self, full: tuple[int, ...], world_size: int) -> tuple[int, ...]:
        """The shape of one rank's shard."""
        if self.by_rows:
            return (-(-full[0] // world_size), *full[1:])
        group = world_size * self.multiple
        return (-(-math.prod(full) // group) * self.multiple,)

    def cut(
        self, key: str, metadata: dict[str, Any], rank: int, world_size: int
    ) -> Cut:
        full = shard_info(key, metadata)[1]
        shape = self.shape(full, world_size)
        return Cut(rank * math.prod(shape), shape, math.prod(full))


def division_of(
    shapes: dict[str, tuple[int, ...]], metadata: dict[str, Any]
) -> Division:
    """How the shards `shapes` (of one rank, by key) were cut.

    Recorded by ours (`shard_param_on_dim_0`, `shard_size_multiple`), inferred for the
    original's: a shard of several dimensions means rows, and elements are padded to
    multiples of 128 unless a shard's length is none.
    """
    if "shard_param_on_dim_0" in metadata:
        by_rows = bool(metadata["shard_param_on_dim_0"])
        return Division(by_rows, int(metadata.get("shard_size_multiple", 128)))
    full = {key: shard_info(key, metadata)[1] for key in shapes}
    exact = all(
        shape[1:] == full[key][1:] and len(shape) == len(full[key])
        for key, shape in shapes.items()
    )
    multiple = math.gcd(128, *(math.prod(shape) for shape in shapes.values()))
    several = any(len(shape) > 1 for shape in shapes.values())
    return Division(exact and (several or multiple < 128), multiple)


# Whether what a shard file says of itself has the form that the readers count on.


def is_list_of(kind: type, value: Any) -> bool:
    """Is it a list, or tuple, of nothing else? (True and False are no int.)"""
    return isinstance(value, list | tuple) and all(type(v) is kind for v in value)


def _is_shape(value: Any) -> bool:
    return is_list_of(int, value) and all(extent >= 0 for extent in value)


def _is_unit(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(info, dict)
        and isinstance(info.get("_orig_name"), str)
        and _is_shape(info.get("_orig_size"))
        for info in value.values()
    )


def _is_flat(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 3:
        return False
    names, shapes, numels = value
    return (
        is_list_of(str, names)
        and isinstance(shapes, list | tuple)
        and all(map(_is_shape, shapes))
        and _is_shape(numels)
        and len(names) == len(shapes) == len(numels)
    )


def _is_buffer(value: Any) -> bool:
    return isinstance(value, dict) and dtype_name(value.get("_orig_dtype")) in ARCHIVED


# Table of the metadata: what an entry of it is, and the check of one.
_TABLES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "shard_info": ("shards with their '_orig_name' and '_orig_size'", _is_unit),
    "flatten_info": ("as many names, shapes and numbers of elements", _is_flat),
    "buffer_info": ("a dict of an '_orig_dtype' of torch", _is_buffer),
    "shared_info": ("the first name of the parameter", lambda v: isinstance(v, str)),
}


def check_metadata(path: str, metadata: Any) -> None:
    """Raise ValueError, which names the file and the entry, for what is no
    get_shard_metadata()."""
    for key in ("shard_info", "flatten_info", "buffer_info", "world_size", "rank"):
        if not isinstance(metadata, dict) or key not in metadata:
            raise ValueError(f"{path}: its shard_metadata has no {key!r}")
    for key, (expected, fits) in _TABLES.items():
        _check_table(path, key, metadata.get(key, {}), expected, fits)
    rank, world_size = metadata["rank"], metadata["world_size"]
    if not is_list_of(int, [rank, world_size]) or not 0 <= rank < world_size:
        raise ValueError(
            f"{path}: its shard_metadata has rank {rank!r} and world_size "
            f"{world_size!r}; these are integers, and 0 <= rank < world_size"
        )
    block = metadata.get("block_size", 1)
    if type(block) is not int or block < 1:
        raise ValueError(
            f"{path}: its shard_metadata has block_size {block!r}, which is no integer "
            "above 0"
        )


def _check_table(
    path: str, key: str, table: Any, expected: str, fits: Callable[[Any], bool]
) -> None:
    if not isinstance(table, dict):
        raise ValueError(
            f"{path}: {key!r} of its shard_metadata is a {type(table).__name__}, not a "
            "dict by name"
        )
    for name, value in table.items():
        if not isinstance(name, str) or not fits(value):
            raise ValueError(
                f"{path}: {key!r} of its shard_metadata must have {expected} for each "
                f"name, has {value!r} for {name!r}"
            )


def check_optimizer(path: str, optimizer: Any) -> None:
    """Raise ValueError, which names the file, for what is no optimizer's
    state_dict()."""
    needed = {"state", "param_groups"}
    if not isinstance(optimizer, dict) or not needed <= optimizer.keys():
        raise ValueError(
            f"{path}: its 'optimizer' is no state_dict() of an optimizer, a dict of "
            "'state' and 'param_groups'"
        )
    state, groups = optimizer["state"], optimizer["param_groups"]
    if not isinstance(state, dict) or not all(map(_is_state, state.items())):
        raise ValueError(
            f"{path}: 'state' of its optimizer must have a dict of values for each "
            "parameter's number"
        )
    if not isinstance(groups, list | tuple) or not all(map(_is_group, groups)):
        raise ValueError(
            f"{path}: 'param_groups' of its optimizer must be a list of dicts, each "
            "with the numbers of its 'params'"
        )


def _is_state(entry: tuple[Any, Any]) -> bool:
    index, values = entry
    number = index.isdecimal() if isinstance(index, str) else type(index) is int
    return number and isinstance(values, dict)


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and is_list_of(int, group.get("params"))


# Shard files, of the original and ours: what one rank saved.


METADATA_KEY = "ctrainer.shard"
MODEL = "model."
OPTIMIZER = "optimizer."
KEYS = (
    "model",
    "shard_metadata",
    "optimizer",
)  # of a shard; what else is there is more
Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank saved. `model`, the optimizer's state and `more`, what was saved
    under keys of its own, hold Stored tensors."""

    path: str
    model: dict[str, Stored]
    metadata: Metadata
    optimizer: dict[str, Any] | None
    more: dict[str, Any]

    @property
    def rank(self) -> int:
        return int(self.metadata["rank"])

    @property
    def world_size(self) -> int:
        return int(self.metadata["world_size"])

    def parts(self) -> list[Part]:
        """Every tensor of the unsharded module.

        Raises ValueError, which names the file, where metadata and tensors do not fit.
        """
        try:
            return parts_of(self.model, self.metadata)
        except ValueError as problem:
            raise ValueError(f"{self.path}: {problem}") from None


def read_shard(path: str) -> Shard:
    """Read one shard file; its data is checked and stays in the file.

    Raises:
        ValueError: it is damaged or no shard file; the text names it.
    """
    if path.endswith(".safetensors"):
        content = _read_safetensors(path)
    else:
        content = read_archive(path)
    if not isinstance(content, dict) or "shard_metadata" not in content:
        raise ValueError(
            f"{path}: holds no 'shard_metadata'; every rank has to save {{'model': "
            "module.state_dict(), 'shard_metadata': module.get_shard_metadata()}"
        )
    model, metadata = content.get("model"), content["shard_metadata"]
    if not isinstance(model, dict):
        raise ValueError(f"{path}: holds no 'model', which must be a state_dict")
    check_metadata(path, metadata)
    tensors = {
        name: t
        for name, t in with_keys(model, _keys_in(metadata)).items()
        if isinstance(t, Stored)
    }
    more = {key: value for key, value in content.items() if key not in KEYS}
    return Shard(path, tensors, metadata, content.get("optimizer"), more)


def described(path: str) -> tuple[list[str], Metadata]:
    """The names of the tensors of a rank's model in its safetensors file, and the
    metadata; the data is not read."""
    metadata, _ = _C.safetensors_index(path)
    content = _described(path, metadata.get(METADATA_KEY, "null"))
    names = [name.removeprefix(MODEL) for name in content["names"]]
    return names, content["shard_metadata"]


def _described(path: str, text: str) -> dict[str, Any]:
    """What the metadata of a safetensors file says of the shards in it."""
    content = parse_json(text, f"{path}: {METADATA_KEY}")
    if not isinstance(content, dict) or not is_list_of(str, content.get("names")):
        raise ValueError(
            f"{path}: its {METADATA_KEY!r} has no list of 'names'; it is not of a "
            "rank's shards, which ctrainer.fsdp.save_shard writes"
        )
    return content


def _read_safetensors(path: str) -> dict[str, Any]:
    metadata, tensors = read_safetensors_index(path)
    if METADATA_KEY not in metadata:
        return {}
    content = _described(path, metadata[METADATA_KEY])
    content["model"] = {
        name.removeprefix(MODEL): tensor
        for name in content.pop("names")
        if (tensor := tensors.get(name)) is not None
    }
    optimizer = content.get("optimizer")
    if optimizer is not None:
        check_optimizer(path, optimizer)
        optimizer["state"] = {
            int(index): {
                name: tensors.get(f"{OPTIMIZER}{index}.{name}", value)
                for name, value in state.items()
            }
            for index, state in optimizer["state"].items()
        }
    return content


# The shard files of one save: one of each rank, read as one set.


def find_shards(
    ckpt_prefix: str, ckpt_suffix: str, results: Sequence[str] = ()
) -> list[Shard]:
    """The shards of the files prefix + suffix (a glob pattern), by rank, all there and
    of one save. Of `results`, and of "*_consolidated" files, those that are no shards
    are left out: an earlier call wrote them.

    Raises:
        AssertionError: there are none, or not one of each rank.
        ValueError: a file is damaged, or of another save; the text names it.
    """
    pattern = ckpt_prefix + ckpt_suffix
    paths = shard_paths(ckpt_prefix, ckpt_suffix, results)
    if not paths:
        raise AssertionError(
            f"Cannot find any files matching {pattern}. {_what_is_there(ckpt_prefix)}"
        )
    shards = sorted(map(read_shard, paths), key=lambda shard: shard.rank)
    _check_ranks(shards, pattern)
    for shard in shards[1:]:
        _check_same_save(shards[0], shard)
    return shards


def shard_paths(prefix: str, suffix: str, results: Sequence[str] = ()) -> list[str]:
    """The files that prefix + suffix names, but those of earlier calls."""
    found = sorted(glob.glob(prefix + suffix))
    return [path for path in found if not _is_result(path, results)]


def check_none_is_replaced(shards: Iterable[Shard], results: Iterable[str]) -> None:
    """Shards are read while results are written: raise ValueError where they meet."""
    read = {os.path.realpath(shard.path) for shard in shards}
    for path in results:
        if os.path.realpath(path) in read:
            raise ValueError(
                f"{path} is one of the shards to read and would be replaced; give "
                "another save_path"
            )


def _is_result(path: str, results: Sequence[str]) -> bool:
    """Was it written by an earlier call, or left by one that was killed?"""
    if path.endswith(SAVING):
        return True
    stem = os.path.splitext(path)[0].removesuffix(".optimizer")
    named = os.path.realpath(path) in map(os.path.realpath, results)
    return stem.endswith("_consolidated") or (named and not _is_shard(path))


def _is_shard(path: str) -> bool:
    try:
        read_shard(path)
    except (ValueError, OSError):
        return False
    return True


def _what_is_there(prefix: str) -> str:
    """For who gave a pattern that matches nothing."""
    folder = os.path.dirname(prefix) or "."
    if os.path.isdir(prefix) and not prefix.endswith(os.sep):
        return f"{prefix} is a folder: let ckpt_prefix end with {os.sep!r}."
    if not os.path.isdir(folder):
        return f"There is no folder {folder}."
    beginning = os.path.basename(prefix)
    names = sorted(n for n in os.listdir(folder) if n.startswith(beginning))
    if not names:
        return f"No name in the folder {folder} begins with {beginning!r}."
    return f"There are {names[:3]}: give a ckpt_suffix that matches the shards."


def _check_ranks(shards: list[Shard], pattern: str) -> None:
    for rank, shard in enumerate(shards):
        if shard.world_size != len(shards):
            raise AssertionError(
                f"Expecting {shard.world_size} files (based on metadata in "
                f"{shard.path}) but got {len(shards)} files. "
                f"{_why_not_one_of_each(shards, pattern)}"
            )
        if shard.rank != rank:
            raise AssertionError(
                f"Expecting rank {shard.rank} for {shard.path} but it is ranked {rank} "
                f"of {len(shards)} files. {_why_not_one_of_each(shards, pattern)}"
            )


def _why_not_one_of_each(shards: list[Shard], pattern: str) -> str:
    found = [shard.rank for shard in shards]
    by_size = {shard.world_size: shard.path for shard in shards}
    one_save = "let ckpt_prefix and ckpt_suffix match the files of one save."
    if len(by_size) > 1:
        examples = " and ".join(f"of {n} ranks {path}" for n, path in by_size.items())
        return f"Matching {pattern} are files of several saves, {examples}: {one_save}"
    twice = [shard.path for shard in shards if found.count(shard.rank) > 1]
    if twice:
        return f"Of the same rank are {twice}: {one_save}"
    missing = sorted(set(range(shards[0].world_size)) - set(found))
    return f"Matching {pattern} are ranks {found}; missing are {missing}."


_OF_THE_SAVE = ("shard_info", "flatten_info", "buffer_info", "shared_info")


def _check_same_save(first: Shard, other: Shard) -> None:
    for key in _OF_THE_SAVE:
        a, b = first.metadata.get(key, {}), other.metadata.get(key, {})
        if a != b:
            names = sorted(set(a) ^ set(b)) or [n for n in a if a[n] != b[n]]
            raise ValueError(
                f"{other.path}: its {key} is not that of {first.path}, see "
                f"{names[0]!r}; they are of different models or saves"
            )
    if first.model.keys() != other.model.keys():
        name = sorted(first.model.keys() ^ other.model.keys())[0]
        raise ValueError(
            f"{other.path} and {first.path}: only one of them has the tensor {name!r}"
        )
    for name, mine in first.model.items():
        theirs = other.model[name]
        if (mine.tag, mine.shape) != (theirs.tag, theirs.shape):
            raise ValueError(
                f"{other.path}: tensor {name!r} is {theirs.tag} of shape "
                f"{theirs.shape}, in {first.path} {mine.tag} of shape {mine.shape}"
            )


# Writing state dicts whose tensors lie in other files.


State = dict[str, Any]


def item_of(value: Any) -> Any:
    """A Stored or a torch tensor as an Item, anything else as it is."""
    if isinstance(value, Stored):
        excerpts = (value.excerpt(0, value.numel),) if value.numel else ()
        return Item(value.tag, value.shape, excerpts)
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        flat = host.reshape(-1).view(torch.uint8).numpy()
        return Item(tag_of(host.dtype), tuple(host.shape), flat)
    return value


def tag_of(dtype: torch.dtype) -> str:
    if dtype not in TAGS:
        raise ValueError(f"safetensors has no dtype for {dtype}")
    return TAGS[dtype]


def tensor_of(item: Item) -> torch.Tensor:
    """In memory."""
    if 0 in item.shape:  # what has no bytes cannot be viewed as another dtype
        return torch.empty(item.shape, dtype=DTYPES[item.tag], device="cpu")
    flat = torch.from_numpy(item.read())
    return flat.view(DTYPES[item.tag]).view(item.shape)


def cast(item: Item, dtype: str | None) -> Item:
    """A buffer in its own dtype."""
    if dtype is None or DTYPES[item.tag] == getattr(torch, dtype):
        return item
    made: Item = item_of(tensor_of(item).to(getattr(torch, dtype)))
    return made


def plain(value: Any) -> Any:
    """Metadata as JSON has it: lists for tuples and sizes, names for dtypes."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return dtype_name(value) if isinstance(value, torch.dtype) else value


# Whole files


def write_full(
    path: str,
    model: dict[str, Item],
    optimizer: State | None,
    check: Callable[[], None],
) -> None:
    """`.safetensors` (the optimizer's state in another file beside), else torch.save's
    format. All of it appears, whole, once check() has returned, or nothing."""
    writers: dict[str, Callable[[str], None]]
    if path.endswith(".safetensors"):
        writers = {
            path: lambda to: _C.write_safetensors(to, _raw(model), {"format": "pt"})
        }
        if optimizer is not None:
            tensors, rest = _split_optimizer(optimizer)
            metadata = {METADATA_KEY: _json(path, rest)}
            writers[optimizer_path(path)] = lambda to: _C.write_safetensors(
                to, tensors, metadata
            )
    else:
        content: State = {"model": OrderedDict(model)}
        if optimizer is not None:
            content["optimizer"] = optimizer
        writers = {path: partial(write_archive, content=content)}
    write_together(writers, check)


def optimizer_path(path: str) -> str:
    return f"{os.path.splitext(path)[0]}.optimizer.safetensors"


def write_archive(path: str, content: State) -> None:
    name = path.removesuffix(SAVING)  # which is in the file, as torch has it
    _C.write_archive(path, archive_records(name, content, _ItemPickler))


class _ItemData(NamedTuple):
    item: Item


class _ItemPickler(Pickler):
    """Pickles Items as the tensors that they stand for."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Item):
            return NotImplemented
        stride = tuple(math.prod(obj.shape[i + 1 :]) for i in range(len(obj.shape)))
        hooks: dict[str, Any] = OrderedDict()
        place = (_ItemData(obj), 0, obj.shape, stride, False, hooks)
        dtype = DTYPES[obj.tag]
        if dtype in torch.storage._dtype_to_storage_type_map():
            return torch._utils._rebuild_tensor_v2, place
        return torch._utils._rebuild_tensor_v3, (*place, dtype)

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _ItemData):
            return super().persistent_id(obj)
        item, number = obj.item, str(len(self.records))
        self.records.append(item.data)
        kinds = torch.storage._dtype_to_storage_type_map()
        name = kinds.get(DTYPES[item.tag])
        kind = torch.UntypedStorage if name is None else getattr(torch, name)
        n = math.prod(item.shape) * (DTYPES[item.tag].itemsize if name is None else 1)
        return ("storage", kind, number, "cpu", n)


def _raw(items: dict[str, Item]) -> dict[str, Any]:
    return {name: (item.data, item.tag, item.shape) for name, item in items.items()}


def _json(path: str, value: Any) -> str:
    def reject(found: Any) -> Any:
        raise ValueError(
            f"{path}: a {type(found).__name__} among the metadata or the options of an "
            "optimizer's group is no JSON; make it a number, or save as .pth"
        )

    return json.dumps(value, default=reject)


def _split_optimizer(optimizer: State) -> tuple[dict[str, Any], State]:
    """The tensors as "optimizer.PARAMETER.NAME", and everything else for JSON."""
    tensors: dict[str, Any] = {}
    state: State = {}
    for key, values in optimizer["state"].items():
        items = {n: v for n, v in values.items() if isinstance(v, Item)}
        tensors |= {f"{OPTIMIZER}{key}.{n}": v for n, v in _raw(items).items()}
        state[str(key)] = {n: None if n in items else v for n, v in values.items()}
    return tensors, optimizer | {"state": state}


# Shards


def write_shard(path: str, content: State) -> None:
    """{"model", "shard_metadata", "optimizer" or none, more} with Items in the place of
    tensors: safetensors with JSON in its metadata, or torch.save's format of plain
    types. The name says which, without its SAVING."""
    content = _as_plain(content)
    if path.removesuffix(SAVING).endswith(".safetensors"):
        _C.write_safetensors(path, *_as_safetensors(path, content))
    else:
        write_archive(path, content)


def _as_plain(content: State) -> State:
    made = {key: v for key, v in content.items() if key != "optimizer" or v is not None}
    return made | {"shard_metadata": plain(content["shard_metadata"])}


def _as_safetensors(path: str, content: State) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of the file, and its metadata."""
    tensors = _raw({f"{MODEL}{name}": item for name, item in content["model"].items()})
    rest = {key: value for key, value in content.items() if key not in KEYS}
    if "names" in rest:
        raise ValueError(f"{path}: 'names' is a key of the format; choose another")
    rest["shard_metadata"] = content["shard_metadata"]
    rest["names"] = list(tensors)
    if "optimizer" in content:
        more, rest["optimizer"] = _split_optimizer(content["optimizer"])
        tensors |= more
    return tensors, {METADATA_KEY: _json(path, rest)}


# Reading whole files


def open_full(path: str) -> dict[str, torch.Tensor]:
    """The model's tensors of a file of write_full, mapped: pages are read when used,
    and changes stay in memory."""
    if path.endswith(".safetensors"):
        return mapped(path)
    with unchanged(path), naming(path):
        return _map(path, read_archive(path)["model"])


def mapped(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped in the same way."""
    with unchanged(path):
        return _map(path, read_safetensors_index(path)[1])


def _map(path: str, index: dict[str, Stored]) -> dict[str, torch.Tensor]:
    size = os.path.getsize(path)
    flat = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name, stored in index.items():
        dtype = DTYPES[stored.tag]
        data = flat[stored.offset :][: stored.numel * dtype.itemsize]
        tensors[name] = data.view(dtype).view(stored.shape)
    return tensors


# A rank's own shard file: written and read back.


def save_shard(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what one rank has to save, whole or not at all.

    Args:
        content (dict[str, Any]): {"model": module.state_dict(), "shard_metadata":
            module.get_shard_metadata()}, and "optimizer": optimizer.state_dict() if it
            is to be saved. What is under other keys, such as a step, is saved, too.
        path (str | os.PathLike[str]): ".safetensors", with all that is no tensor as
            JSON in the metadata, or else torch.save's format; both hold plain types
            only, so that they can be read with weights_only=True.

    Raises:
        ValueError: something is neither a tensor nor JSON; or a key of its own is
            "names", or has tensors, and the file is to be a safetensors file.
        OSError: of the disk; what was at path is still there then.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FullyShardedDataParallel, save_shard
        >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 2))
        >>> metadata = model.get_shard_metadata()
        >>> content = {"model": model.state_dict(), "shard_metadata": metadata}
        >>> save_shard(content, "rank0.safetensors")
    """
    made = {key: _map_values(item_of, value) for key, value in content.items()}
    write_shard(os.fspath(path), made)


def add_shard(sink: Sink, name: str, content: dict[str, Any]) -> None:
    """Let the sink have what save_shard() would write to NAME.safetensors: tensors are
    copied where they are, by C and, if the sink is a writer's, without a wait."""
    made = {key: _map_values(_item_there, value) for key, value in content.items()}
    sink.tensors(name, *_as_safetensors(name, _as_plain(made)))


def _item_there(value: Any) -> Any:
    """item_of(), but for the memory: it stays a GPU's, if C reads that."""
    if not isinstance(value, torch.Tensor):
        return value
    there = value.detach().contiguous()
    if not _C.has_kernels(there):
        return item_of(there)
    flat = there.reshape(-1).view(torch.uint8)
    return Item(tag_of(there.dtype), tuple(there.shape), flat)


def load_shard(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a file of `save_shard`, or of torch.save with the same
    keys, on the CPU.

    Args:
        path (str | os.PathLike[str]): The file.

    Raises:
        ValueError: it is damaged or no shard file; the message names it.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FullyShardedDataParallel, load_shard, save_shard
        >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 2))
        >>> metadata = model.get_shard_metadata()
        >>> content = {"model": model.state_dict(), "shard_metadata": metadata}
        >>> save_shard(content, "rank0.safetensors")
        >>> sorted(load_shard("rank0.safetensors"))
        ['model', 'shard_metadata']
    """
    with unchanged(path):
        shard = read_shard(os.fspath(path))
        content = {"model": shard.model, "shard_metadata": shard.metadata, **shard.more}
        if shard.optimizer is not None:
            content["optimizer"] = shard.optimizer
        return tensors_of(content)


def tensors_of(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a shard with what lies in files read into memory."""
    return {key: _map_values(_tensor, value) for key, value in content.items()}


def _tensor(value: Any) -> Any:
    item = item_of(value) if isinstance(value, Stored) else value
    return tensor_of(item) if isinstance(item, Item) else value


def _map_values(change: Any, value: Any) -> Any:
    """`change` of everything below dicts and lists."""
    if isinstance(value, dict):
        return {key: _map_values(change, v) for key, v in value.items()}
    if isinstance(value, list):
        return [_map_values(change, v) for v in value]
    return change(value)
