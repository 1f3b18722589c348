"""Writing state dicts whose tensors lie in other files."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ctrainer import _C
from ctrainer.adapters._torch_checkpoint import (
    DTYPES,
    TAGS,
    Pickler,
    archive_records,
)
from ctrainer.checkpoint.files import naming, unchanged
from ctrainer.fsdp._shard_layout import dtype_name
from ctrainer.fsdp._shards import KEYS, METADATA_KEY, MODEL, OPTIMIZER
from ctrainer.fsdp._stored import Item, Stored, read_safetensors_index
from ctrainer.fsdp._together import SAVING, write_together
from ctrainer.fsdp._torch_archive import read_archive

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
        writers = {path: partial(_write_model, model)}
        if optimizer is not None:
            writers[optimizer_path(path)] = partial(_write_optimizer, optimizer)
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


def _write_model(model: dict[str, Item], path: str) -> None:
    _C.write_safetensors(path, _raw(model), {"format": "pt"})


def _write_optimizer(optimizer: State, path: str) -> None:
    tensors, rest = _split_optimizer(optimizer)
    _C.write_safetensors(path, tensors, {METADATA_KEY: _json(path, rest)})


def _json(path: str, value: Any) -> str:
    def refuse(found: Any) -> Any:
        raise ValueError(
            f"{path}: a {type(found).__name__} among the metadata or the options of an "
            "optimizer's group is no JSON; make it a number, or save as .pth"
        )

    return json.dumps(value, default=refuse)


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
    if content.get("optimizer") is None:
        content = {key: v for key, v in content.items() if key != "optimizer"}
    content["shard_metadata"] = plain(content["shard_metadata"])
    if not path.removesuffix(SAVING).endswith(".safetensors"):
        write_archive(path, content)
        return
    tensors = _raw({f"{MODEL}{name}": item for name, item in content["model"].items()})
    rest = {key: value for key, value in content.items() if key not in KEYS}
    if "names" in rest:
        raise ValueError(f"{path}: 'names' is a key of the format; choose another")
    rest["shard_metadata"] = content["shard_metadata"]
    rest["names"] = list(tensors)
    if "optimizer" in content:
        more, rest["optimizer"] = _split_optimizer(content["optimizer"])
        tensors |= more
    _C.write_safetensors(path, tensors, {METADATA_KEY: _json(path, rest)})


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
        end = stored.offset + len_bytes(stored)
        tensors[name] = (
            flat[stored.offset : end].view(DTYPES[stored.tag]).view(stored.shape)
        )
    return tensors


def len_bytes(stored: Stored) -> int:
    return int(stored.numel * DTYPES[stored.tag].itemsize)
