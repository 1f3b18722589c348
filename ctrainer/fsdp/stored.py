"""Tensors that lie in files: where, in safetensors and in archives of torch.save, and
how they become others without being read.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ctrainer import _C
from ctrainer.adapters._torch_checkpoint import DTYPES
from ctrainer.checkpoint.files import expected_of, unchanged

# (path or None for zeros, offset, bytes): what C copies from file to file.
Excerpt = tuple[bytes | None, int, int]

ITEM_BYTES = {tag: dtype.itemsize for tag, dtype in DTYPES.items()} | {"F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class Stored:
    """A contiguous tensor of a file.

    `tag` is its dtype as safetensors calls it, `offset` counts bytes from the file's
    beginning.
    """

    path: str
    offset: int
    tag: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def excerpt(self, begin: int, n: int) -> Excerpt:
        """Elements [begin, begin + n)."""
        size = ITEM_BYTES[self.tag]
        return os.fsencode(self.path), self.offset + begin * size, n * size


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to write: excerpts of files, or bytes in memory; to a checkpoint's
    writer, a tensor of uint8 where the writer reads it."""

    tag: str
    shape: tuple[int, ...]
    data: tuple[Excerpt, ...] | np.ndarray[Any, Any] | torch.Tensor

    def read(self, fill: int = 0) -> np.ndarray[Any, Any]:
        """Its bytes, with `fill` where no file has them."""
        if isinstance(self.data, np.ndarray):
            return self.data
        n = math.prod(self.shape) * ITEM_BYTES[self.tag]
        memory = np.full(n, fill, np.uint8)
        at = 0
        for path, offset, n in self.data:
            if path is not None:
                read_into(memory[at : at + n], path, offset)
            at += n
        return memory


def read_into(memory: np.ndarray[Any, Any], path: bytes, offset: int) -> None:
    """Fill the memory with the file's bytes from the offset on."""
    with open(path, "rb") as file:
        file.seek(offset)
        if file.readinto(memory.data) != memory.size:
            raise ValueError(f"{os.fsdecode(path)}: was cut short while it was read")


def joined(
    parts: Sequence[Stored], begin: int, n: int, total: int | None = None
) -> tuple[Excerpt, ...]:
    """Elements [begin, begin + n) of the parts laid end to end, the first `total` of
    which count; what lies beyond is zero."""
    found: list[Excerpt] = []
    end = begin + n
    total = sum(part.numel for part in parts) if total is None else total
    at = 0
    for part in parts:
        first, last = max(begin, at), min(end, at + part.numel, total)
        if first < last:
            found.append(part.excerpt(first - at, last - first))
        at += part.numel
    missing = end - max(begin, min(end, at, total))
    if missing > 0:
        found.append((None, 0, missing * ITEM_BYTES[parts[0].tag]))
    return tuple(found)


def read_safetensors_index(path: str) -> tuple[dict[str, str], dict[str, Stored]]:
    """The metadata and the tensors of a safetensors file, whose data is checked."""
    with unchanged(path):
        metadata, index = _C.safetensors_index(path, True, expected_of(path))
        at = os.path.getsize(path) - sum(nbytes for *_, nbytes in index)
    tensors = {}
    for name, tag, shape, nbytes in index:
        tensors[name] = Stored(path, at, tag, shape)
        at += nbytes
    return metadata, tensors


# What a file of torch.save holds, its tensors left where they are.
#
# The pickle is read with less trust than weights_only=True has: a name that it gives is
# looked up in one short table of plain types, and what is not there is rejected.


_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16",
    "BFloat16Storage": "BF16", "LongStorage": "I64", "IntStorage": "I32",
    "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
}  # fmt: skip
ARCHIVED = {str(dtype).removeprefix("torch."): tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    tag: str


class _Unpickler(pickle._Unpickler):
    """Python's own, whose memo is a dict: no number in the file makes it large."""

    def __init__(self, file: io.BytesIO, archive: _Archive) -> None:
        super().__init__(file)
        self._archive = archive
        self._names: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): tuple,
            ("torch", "device"): str,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("torch.storage", "UntypedStorage"): "U8",
            **{("torch", name): tag for name, tag in _STORAGES.items()},
            **{("torch", name): name for name in ARCHIVED},
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise ValueError(
                f"{self._archive.path}: holds a {module}.{name}; shard files may hold "
                "tensors, numbers, strings, lists, tuples and dicts only"
            )
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, tag, key, _, _ = pid
        return _Storage(key, tag)

    def _tensor(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,
    ) -> Stored:
        return self._archive.tensor(storage.key, storage.tag, offset, shape, stride)

    def _tensor_of_dtype(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        _requires_grad: bool,
        _hooks: Any,
        dtype: str,
        *_: Any,
    ) -> Stored:
        return self._archive.tensor(storage.key, ARCHIVED[dtype], offset, shape, stride)


def _parameter(data: Stored, *_: Any) -> Stored:
    return data


class _Archive:
    """The records of a file that torch.save wrote, which C has checked."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._places = _C.archive_index(path, expected_of(path))

    def load(self) -> Any:
        if self._record("byteorder", b"little") != b"little":
            raise ValueError(f"{self.path}: was written by a big-endian machine")
        return _Unpickler(io.BytesIO(self._record("data.pkl")), self).load()

    def _record(self, name: str, default: bytes | None = None) -> bytes:
        if default is not None and name not in self._places:
            return default
        offset, nbytes = self._place(name)
        memory = np.empty(nbytes, np.uint8)
        read_into(memory, os.fsencode(self.path), offset)
        return memory.tobytes()

    def tensor(
        self,
        key: str,
        tag: str,
        begin: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> Stored:
        if not _is_contiguous(shape, stride):
            raise ValueError(
                f"{self.path}: holds a tensor of shape {shape} and stride {stride}; "
                "save .contiguous() ones"
            )
        offset, nbytes = self._place(f"data/{key}")
        found = Stored(self.path, offset + begin * ITEM_BYTES[tag], tag, shape)
        if begin < 0 or (begin + found.numel) * ITEM_BYTES[tag] > nbytes:
            raise ValueError(f"{self.path}: a tensor of shape {shape} ends too late")
        return found

    def _place(self, name: str) -> tuple[int, int]:
        if name not in self._places:
            raise ValueError(f"{self.path}: has no record {name!r}")
        return self._places[name]


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for extent, step in zip(reversed(shape), reversed(stride), strict=True):
        if extent == 0:
            return True
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def read_archive(path: str) -> Any:
    """The object that torch.save wrote to path, with a Stored for each tensor, a tuple
    for each torch.Size and the name of each dtype. Every record is compared with its
    checksum.

    Raises:
        ValueError: the file is damaged, not of torch.save's format since torch 1.6, or
            holds something else than plain data.
    """
    archive = _Archive(path)
    try:
        return archive.load()
    except (OSError, ValueError) as problem:
        if path in str(problem):
            raise
        raise ValueError(f"{path}: is no file of torch.save: {problem!r}") from None
    except Exception as problem:
        raise ValueError(f"{path}: is no file of torch.save: {problem!r}") from None
