"""Data sets in the TNTIDX format that fairseq has of TorchNet, read item by item.

PREFIX.idx: b"TNTIDX\\0\\0", version 1, a dtype's code, the bytes of an element, the
number of items, the number of dimensions of all items together; then, for each item and
the end, where its dimensions begin and where its elements begin; then the dimensions:
all uint64 or int64, little-endian. Source: fairseq, data/indexed_dataset.py.
"""

from __future__ import annotations

import math
import os
import struct
from array import array
from typing import Any

import numpy as np

from ctrainer.fairseq._file_pair import (
    PairWriter,
    data_file_path,
    dtype_of_code,
    index_file_path,
    long_tensor,
    map_bytes,
    pair_exists,
)
from ctrainer.fairseq._mmap_dataset import WRONG_FORMAT
from ctrainer.fairseq.fairseq_dataset import FairseqDataset

_HEADER = struct.Struct("<8sQQQQQ")


def _rises(offsets: Any) -> bool:
    return bool(offsets[0] >= 0 and (offsets[1:] >= offsets[:-1]).all())


class IndexedDataset(FairseqDataset):
    """The items of PREFIX.bin as int64 tensors, each read from the file when asked for.

    fix_lua_indexing subtracts 1, which the builder adds. Reading moves no file
    position, so that forked workers may share the set. Raises ValueError, naming the
    file, for one that is cut off or corrupt.
    """

    _HDR_MAGIC = b"TNTIDX\x00\x00"

    def __init__(self, path: str, fix_lua_indexing: bool = False) -> None:
        self.path = path
        self.fix_lua_indexing = fix_lua_indexing
        self.data_file: Any = None
        self.read_index(path)

    def read_index(self, path: str) -> None:
        file = index_file_path(path)
        whole = map_bytes(file)
        magic = whole[:8].tobytes()
        if magic != self._HDR_MAGIC or whole.nbytes < _HEADER.size:
            raise ValueError(
                f"{file}: {WRONG_FORMAT} It has {whole.nbytes} bytes and begins with "
                f"{magic!r}"
            )
        _, version, code, self.element_size, n, n_dims = _HEADER.unpack_from(whole)
        if version != 1:
            raise ValueError(f"{file}: version {version} of the format; expected 1")
        self.dtype = dtype_of_code(code, file)
        expected = _HEADER.size + 8 * (2 * (n + 1) + n_dims)
        if whole.nbytes != expected:
            raise ValueError(
                f"{file}: an index of {n} items of {n_dims} dimensions has {expected} "
                f"bytes, this file has {whole.nbytes}: it is cut off or corrupt"
            )
        table = whole[_HEADER.size :].view("<i8")
        self.dim_offsets, self.data_offsets = table[: 2 * n + 2].reshape(2, n + 1)
        self.sizes = table[2 * n + 2 :]
        self._len = n
        self._check(file, n_dims)

    def _check(self, file: str, n_dims: int) -> None:
        if not _rises(self.dim_offsets) or self.dim_offsets[-1] > n_dims:
            raise ValueError(f"{file}: the items' dimensions do not follow each other")
        if not _rises(self.data_offsets) or (self.sizes < 0).any():
            raise ValueError(f"{file}: the items do not follow each other")
        data = data_file_path(self.path)
        needed = int(self.data_offsets[-1]) * self.element_size
        if needed > os.path.getsize(data):
            raise ValueError(
                f"{data} has {os.path.getsize(data)} bytes, and {file} has items up to "
                f"byte {needed}"
            )

    def read_data(self, path: str) -> None:
        self.data_file = open(data_file_path(path), "rb", buffering=0)

    def check_index(self, i: int) -> None:
        if not 0 <= i < self._len:
            raise IndexError(f"item {i} of {self.path}, which has {self._len}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data_file": None}

    def _read(self, i: int) -> Any:
        """Item i as an array of the file's dtype."""
        if self.data_file is None:
            self.read_data(self.path)
        first, end = self.dim_offsets[i : i + 2]
        shape = self.sizes[first:end].tolist()
        n_bytes = math.prod(shape) * self.dtype.itemsize
        begin = int(self.data_offsets[i]) * self.element_size
        room = int(self.data_offsets[i + 1]) * self.element_size - begin
        if n_bytes != room:
            raise ValueError(
                f"{index_file_path(self.path)}: item {i} of shape {shape} takes "
                f"{n_bytes} bytes, and {room} are kept for it"
            )
        data = os.pread(self.data_file.fileno(), n_bytes, begin)
        if len(data) != n_bytes:
            raise ValueError(
                f"{data_file_path(self.path)} ends within item {i}, bytes {begin} to "
                f"{begin + n_bytes}"
            )
        return np.frombuffer(data, self.dtype).reshape(shape)

    def __getitem__(self, i: int) -> Any:
        """Item i as an int64 tensor of its shape."""
        self.check_index(i)
        item = self._read(i).astype(np.int64)
        return long_tensor(item - 1 if self.fix_lua_indexing else item)

    def __len__(self) -> int:
        return int(self._len)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    @staticmethod
    def exists(path: str) -> bool:
        return pair_exists(path)


class IndexedCachedDataset(IndexedDataset):
    """An IndexedDataset that keeps in memory what prefetch() was told; the rest it
    reads from the file."""

    def __init__(self, path: str, fix_lua_indexing: bool = False) -> None:
        super().__init__(path, fix_lua_indexing)
        self.cache: dict[int, Any] = {}

    @property
    def supports_prefetch(self) -> bool:
        return True

    def prefetch(self, indices: Any) -> None:
        """Reads those items, in the order of the file, in place of what was kept."""
        wanted = sorted(set(indices))
        for i in wanted[:1] + wanted[-1:]:
            self.check_index(i)
        if not self.cache.keys() >= set(wanted):
            read = super()._read
            self.cache = {i: read(i) for i in wanted}

    def _read(self, i: int) -> Any:
        kept = self.cache.get(i)
        return super()._read(i) if kept is None else kept


class IndexedDatasetBuilder(PairWriter):
    """Writes a data set item by item, 1 added to each element: `out_file` is its .bin.

    The files appear, whole, with finalize(index_file), and not at all without it.
    """

    def __init__(self, out_file: str | os.PathLike[str], dtype: Any = np.int32) -> None:
        super().__init__(out_file, dtype)
        self.data_offsets = array("q", [0])
        self.dim_offsets = array("q", [0])
        self.sizes = array("q")

    def add_item(self, tensor: Any) -> None:
        item = np.asarray(tensor)
        added = np.add(item, 1, dtype=np.int64 if item.dtype.kind in "biu" else None)
        self.data_offsets.append(self.data_offsets[-1] + self._write_item(added))
        self.sizes.extend(item.shape)
        self.dim_offsets.append(self.dim_offsets[-1] + item.ndim)

    def merge_file_(self, another_file: str) -> None:
        """Appends the items of another data set, given by its prefix."""
        other = IndexedDataset(another_file)
        if other.dtype != self._dtype:
            raise ValueError(
                f"{another_file} has elements of {other.dtype}; expected "
                f"{self._dtype}, as in {self._path}"
            )
        self._append_file(data_file_path(another_file))
        data, dims = self.data_offsets[-1], self.dim_offsets[-1]
        self.data_offsets.extend((other.data_offsets[1:] + data).tolist())
        self.dim_offsets.extend((other.dim_offsets[1:] + dims).tolist())
        self.sizes.extend(other.sizes.tolist())

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """Writes the index and gives both files their names."""
        n, n_dims = len(self.data_offsets) - 1, len(self.sizes)
        header = _HEADER.pack(
            IndexedDataset._HDR_MAGIC, 1, self._code, self._dtype.itemsize, n, n_dims
        )
        tables = (self.dim_offsets, self.data_offsets, self.sizes)
        self._commit(index_file, [header, *(np.array(t, "<i8") for t in tables)])
