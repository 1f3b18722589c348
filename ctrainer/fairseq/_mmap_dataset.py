"""Data sets in fairseq's MMIDIDX format, read where they lie in the file.

PREFIX.idx: b"MMIDIDX\\0\\0", version 1 (uint64), a dtype's code (uint8), the number of
items (uint64), their sizes in elements (int32) and their offsets in bytes (int64), all
little-endian and packed. PREFIX.bin: the elements. Source: fairseq,
data/indexed_dataset.py.
"""

from __future__ import annotations

import os
import struct
from array import array
from typing import Any

import numpy as np

from ctrainer import _C
from ctrainer.fairseq._file_pair import (
    PairWriter,
    data_file_path,
    dtype_of_code,
    index_file_path,
    long_tensor,
    map_bytes,
    pair_exists,
)

WRONG_FORMAT = (
    "Index file doesn't match expected format. Make sure that --dataset-impl is "
    "configured properly."
)
_HEADER = struct.Struct("<9sQBQ")


class MMapIndex:
    """An index file: `sizes` and `offsets` of the items, mapped, and their `dtype`.

    Raises ValueError, naming the file and what is wrong, where it is no such index, is
    of another version, has an unknown dtype, or not the length its items need.
    """

    _HDR_MAGIC = b"MMIDIDX\x00\x00"

    def __init__(self, path: str) -> None:
        self.path = path
        whole = map_bytes(path)
        if whole.nbytes < _HEADER.size:
            raise ValueError(
                f"{path}: {WRONG_FORMAT} It has {whole.nbytes} bytes, less than its "
                "header"
            )
        magic, version, code, n = _HEADER.unpack_from(whole)
        if magic != self._HDR_MAGIC:
            raise ValueError(f"{path}: {WRONG_FORMAT} It begins with {magic!r}")
        if version != 1:
            raise ValueError(f"{path}: version {version} of the format; expected 1")
        self.dtype = dtype_of_code(code, path)
        if whole.nbytes != _HEADER.size + 12 * n:
            raise ValueError(
                f"{path}: an index of {n} items has {_HEADER.size + 12 * n} bytes, "
                f"this file has {whole.nbytes}: it is cut off or of another format"
            )
        end = _HEADER.size + 4 * n
        self.sizes = whole[_HEADER.size : end].view("<i4")
        self.offsets = whole[end:].view("<i8")
        # Items of a memoryview are Python's integers, those of an array NumPy's.
        self._sizes = memoryview(whole)[_HEADER.size : end].cast("i")
        self._offsets = memoryview(whole)[end:].cast("q")

    def check(self, data_path: str, data_bytes: int) -> None:
        """Raises ValueError unless all items lie within a data file of that size."""
        try:
            _C.check_index(self.sizes, self.offsets, self.dtype.itemsize, data_bytes)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error} ({data_path})") from None

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> tuple[int, int]:
        """(offset in bytes, size in elements) of an item."""
        return self._offsets[i], self._sizes[i]


class MMapIndexedDataset:
    """The items of PREFIX.bin as int64 tensors, or as they are as arrays.

    Both files are mapped and none is read ahead; every item is checked to lie within
    the data when the set is opened. An item of int64 is the file's own memory: changing
    it in place changes this process's copy and not the file. Items of other dtypes are
    converted. Pickled by its path. Raises ValueError for a file that is cut off or
    corrupt, naming it.
    """

    Index = MMapIndex
    supports_prefetch = False
    can_reuse_epoch_itr_across_epochs = True

    def __init__(self, path: str) -> None:
        self._open(path)

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self._open(path)

    def _open(self, path: str) -> None:
        index = self.Index(index_file_path(path))
        data_path = data_file_path(path)
        data = map_bytes(data_path, private=True)
        index.check(data_path, data.nbytes)
        self._path = path
        self._index = index
        self._item_bytes = self.dtype.itemsize
        self._data = data[: data.nbytes - data.nbytes % self.dtype.itemsize].view(
            self.dtype
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements in the file."""
        return self._index.dtype

    @property
    def sizes(self) -> Any:
        """Elements of each item: int32, read-only, of shape (len(self),)."""
        return self._index.sizes

    def __len__(self) -> int:
        return len(self._index)

    def _view(self, i: int) -> Any:
        offset, size = self._index[i]
        start = offset // self._item_bytes
        return self._data[start : start + size]

    def array(self, i: int) -> Any:
        """Item i as it lies in the file: a read-only array, without a copy."""
        view = self._view(i)
        view.flags.writeable = False
        return view

    def __getitem__(self, i: int) -> Any:
        """Item i as an int64 tensor of one dimension."""
        return long_tensor(self._view(i))

    def num_tokens(self, index: int) -> int:
        return self._index[index][1]

    def size(self, index: int) -> int:
        return self._index[index][1]

    @staticmethod
    def exists(path: str) -> bool:
        return pair_exists(path)


class MMapIndexedDatasetBuilder(PairWriter):
    """Writes a data set item by item: `out_file` is its .bin.

    add_item() takes tensors and arrays; values that dtype does not hold are an error.
    The files appear, whole, with finalize(index_file), and not at all without it.
    """

    def __init__(self, out_file: str | os.PathLike[str], dtype: Any = np.int64) -> None:
        super().__init__(out_file, dtype)
        self._sizes = array("i")

    def add_item(self, tensor: Any) -> None:
        self._sizes.append(self._write_item(np.asarray(tensor)))

    def merge_file_(self, another_file: str) -> None:
        """Appends the items of another data set, given by its prefix."""
        other = MMapIndexedDataset(another_file)
        if other.dtype != self._dtype:
            raise ValueError(
                f"{another_file} has elements of {other.dtype}; expected "
                f"{self._dtype}, as in {self._path}"
            )
        used = int(other.sizes.sum(dtype=np.int64)) * self._dtype.itemsize
        data = data_file_path(another_file)
        if used != os.path.getsize(data):
            raise ValueError(
                f"{data} has {os.path.getsize(data)} bytes, its items {used}: items "
                "that overlap or leave gaps cannot be appended as a whole"
            )
        self._append_file(data)
        self._sizes.extend(other.sizes.tolist())

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """Writes the index and gives both files their names."""
        sizes = (
            np.frombuffer(self._sizes, np.int32)
            if self._sizes
            else np.empty(0, np.int32)
        )
        ends = np.cumsum(sizes, dtype=np.int64) * self._dtype.itemsize
        offsets = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        header = _HEADER.pack(MMapIndex._HDR_MAGIC, 1, self._code, len(sizes))
        self._commit(index_file, [header, sizes.astype("<i4"), offsets.astype("<i8")])
