"""Tensors that lie in files: where, and how they become others without being read."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctrainer import _C
from ctrainer.checkpoint.files import expected_of, unchanged

# (path or None for zeros, offset, bytes): what C copies from file to file.
Excerpt = tuple[bytes | None, int, int]

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


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
    """A tensor to write: excerpts of files, or bytes in memory."""

    tag: str
    shape: tuple[int, ...]
    data: tuple[Excerpt, ...] | np.ndarray[Any, Any]

    def read(self) -> np.ndarray[Any, Any]:
        """Its bytes."""
        if isinstance(self.data, np.ndarray):
            return self.data
        memory = np.zeros(math.prod(self.shape) * ITEM_BYTES[self.tag], np.uint8)
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
        _C.check_safetensors(path, expected_of(path))
        metadata, index = _C.safetensors_index(path)
        at = os.path.getsize(path) - sum(nbytes for *_, nbytes in index)
    tensors = {}
    for name, tag, shape, nbytes in index:
        tensors[name] = Stored(path, at, tag, shape)
        at += nbytes
    return metadata, tensors
