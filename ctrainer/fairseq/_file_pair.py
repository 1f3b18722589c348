"""The two files of an indexed data set, PREFIX.bin and PREFIX.idx."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ctrainer.checkpoint.disk import sync_folder_of

# What an index calls a dtype. 6 was once a float of Python's, 7 a double: both 8 bytes.
CODES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float64,
    8: np.uint16,
    9: np.uint32,
    10: np.uint64,
}
# Linux counts a private mapping against its memory, which a data set may exceed, unless
# told not to. The value of asm-generic/mman-common.h; Python 3.13 has a name for it.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def index_file_path(prefix_path: str) -> str:
    return prefix_path + ".idx"


def data_file_path(prefix_path: str) -> str:
    return prefix_path + ".bin"


def pair_exists(prefix_path: str) -> bool:
    paths = (index_file_path(prefix_path), data_file_path(prefix_path))
    return all(map(os.path.exists, paths))


def dtype_of_code(code: int, path: str) -> np.dtype[Any]:
    """The little-endian dtype of a code that the index at `path` holds."""
    if code not in CODES:
        known = f"{min(CODES)} to {max(CODES)}"
        raise ValueError(f"{path}: the dtype's code is {code}; expected {known}")
    return cast("np.dtype[Any]", np.dtype(CODES[code]).newbyteorder("<"))


def code_of_dtype(dtype: Any) -> int:
    for code, known in CODES.items():
        if np.dtype(dtype) == known:
            return code
    known_names = ", ".join(sorted({np.dtype(d).name for d in CODES.values()}))
    raise ValueError(f"an index has no dtype {np.dtype(dtype)}; it has {known_names}")


def map_bytes(path: str, *, private: bool = False) -> Any:
    """A file's bytes, mapped. Those of a private mapping may be written to; what is
    written stays in this process, and the file as it is."""
    with open(path, "rb") as file:
        n = os.fstat(file.fileno()).st_size
        if n == 0:  # nothing to map
            return np.empty(0, np.uint8)
        if private:
            flags = mmap.MAP_PRIVATE | _NO_RESERVE
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(file.fileno(), n, flags=flags, prot=prot)
        else:
            mapped = mmap.mmap(file.fileno(), n, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.uint8)


@cache
def _tensor_over() -> Callable[[Any], Any]:
    from ctrainer.adapters._torch_data import tensor_over

    return tensor_over


def long_tensor(array: Any) -> Any:
    """An int64 tensor over an int64 array's memory; torch is imported now."""
    return _tensor_over()(array.astype(np.int64, copy=False))


def _discard(file: BinaryIO, path: str, process: int) -> None:
    if os.getpid() != process:  # a forked child: what it has buffered is the parent's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
        file.close()
        return
    with contextlib.suppress(OSError):  # of a full disk, on which nothing was to stay
        file.close()
    Path(path).unlink(missing_ok=True)


class PairWriter:
    """Writes both files under other names and renames them when they are whole.

    Whoever opens the pair finds the old one, the new one, or none: the old index goes
    before the new data come. Without finalize() nothing remains. Base of the builders.
    """

    def __init__(self, out_file: str | os.PathLike[str], dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._code = code_of_dtype(dtype)
        self._path = os.fspath(out_file)
        self._temporary = f"{self._path}.{os.getpid()}.tmp"
        self._file = open(self._temporary, "wb", 1 << 20)
        self._items = self._bytes = 0
        self._forget = weakref.finalize(
            self, _discard, self._file, self._temporary, os.getpid()
        )

    def _write_item(self, values: Any) -> int:
        """Appends an array in the pair's dtype; returns its number of elements."""
        array = np.ascontiguousarray(values, self._dtype)
        if not np.array_equal(array, values, equal_nan=self._dtype.kind == "f"):
            raise ValueError(
                f"item {self._items} of {self._path} holds values that {self._dtype} "
                "does not: choose a wider dtype, or give make_builder the vocab_size"
            )
        self._file.write(array.data)
        self._items += 1
        self._bytes += array.nbytes
        return array.size

    def _append_file(self, path: str) -> None:
        with open(path, "rb") as other:
            shutil.copyfileobj(other, self._file, 1 << 20)
        self._bytes += os.path.getsize(path)

    def _sync_data(self) -> None:
        self._file.flush()
        written = os.fstat(self._file.fileno()).st_size
        if written != self._bytes:
            raise OSError(
                f"{self._temporary} has {written} bytes of {self._bytes}: an item was "
                "not written whole, and the data set cannot be finished"
            )
        os.fsync(self._file.fileno())

    def _commit(self, index_file: str | os.PathLike[str], parts: Iterable[Any]) -> None:
        """Writes the index's parts, then gives both files their names."""
        index = os.fspath(index_file)
        temporary = f"{index}.{os.getpid()}.tmp"
        try:
            self._sync_data()
            with open(temporary, "wb") as out:
                for part in parts:
                    out.write(part)
                out.flush()
                os.fsync(out.fileno())
            Path(index).unlink(missing_ok=True)
            sync_folder_of(index)
            self._file.close()
            os.replace(self._temporary, self._path)
            os.replace(temporary, index)
            sync_folder_of(index)
        finally:
            Path(temporary).unlink(missing_ok=True)
            self._forget()
