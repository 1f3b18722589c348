"""Binarised data sets by the names of fairseq's data/indexed_dataset.py."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import sys
import weakref
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ctrainer import _C
from ctrainer.checkpoint.disk import sync_folder_of
from ctrainer.fairseq.fairseq_dataset import SizedDataset

# The two files of an indexed data set, PREFIX.bin and PREFIX.idx.


# The code of each dtype in an index. 6 was once a float of Python's, 7 a double: both
# have 8 bytes.
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
# Without this flag Linux counts a private mapping against its memory, which a data set
# may exceed. The value of asm-generic/mman-common.h; Python 3.13 has a name for it.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def index_file_path(prefix_path: str) -> str:
    """Return PREFIX.idx.

    Args:
        prefix_path (str): PREFIX.
    """
    return prefix_path + ".idx"


def data_file_path(prefix_path: str) -> str:
    """Return PREFIX.bin.

    Args:
        prefix_path (str): PREFIX.
    """
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


# Data sets in fairseq's MMIDIDX format, read where they lie in the file.
#
# PREFIX.idx: b"MMIDIDX\0\0", version 1 (uint64), a dtype's code (uint8), the number of
# items (uint64), their sizes in elements (int32) and their offsets in bytes (int64),
# all little-endian and packed. PREFIX.bin: the elements. Source: fairseq,
# data/indexed_dataset.py.


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

    Both files are mapped and neither is prefetched; every item is checked to lie within
    the data when the set is opened. An item of int64 is the file's own memory: changing
    it in place changes this process's copy and not the file. Items of other dtypes are
    converted. Pickled by its path.

    Args:
        path (str): PREFIX.

    Raises:
        ValueError: a file is cut off or corrupt; the message names it.
        OSError: a file cannot be read.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq import MMapIndexedDataset
        >>> from ctrainer.fairseq import MMapIndexedDatasetBuilder
        >>> builder = MMapIndexedDatasetBuilder("train.bin")
        >>> builder.add_item(torch.tensor([4, 5, 2]))
        >>> builder.finalize("train.idx")
        >>> MMapIndexedDataset("train")[0]
        tensor([4, 5, 2])
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
        """Return item i as it lies in the file: a read-only array, without a copy.

        Args:
            i (int): From 0.
        """
        view = self._view(i)
        view.flags.writeable = False
        return view

    def __getitem__(self, i: int) -> Any:
        """Item i as an int64 tensor of one dimension."""
        return long_tensor(self._view(i))

    def num_tokens(self, index: int) -> int:
        """Return the length of an item.

        Args:
            index (int): From 0.
        """
        return self._index[index][1]

    def size(self, index: int) -> int:
        """Return the length of an item.

        Args:
            index (int): From 0.
        """
        return self._index[index][1]

    @staticmethod
    def exists(path: str) -> bool:
        """Return whether both files are there.

        Args:
            path (str): PREFIX.
        """
        return pair_exists(path)


class MMapIndexedDatasetBuilder:
    """Writes a data set item by item.

    Both files are written under other names. They appear, whole, with
    finalize(index_file), and not at all without it: whoever opens the pair finds the
    old one, the new one, or none, as the old index goes before the new data come. For
    an example see MMapIndexedDataset.

    Args:
        out_file (str | os.PathLike[str]): The .bin file.
        dtype (default np.int64): Of the items; values that it does not hold are an
            error.

    Example:
        >>> from ctrainer.fairseq import MMapIndexedDatasetBuilder
        >>> builder = MMapIndexedDatasetBuilder("train.bin")
        >>> builder.finalize("train.idx")  # no items
    """

    def __init__(self, out_file: str | os.PathLike[str], dtype: Any = np.int64) -> None:
        self._dtype = np.dtype(dtype)
        self._code = code_of_dtype(dtype)
        self._path = os.fspath(out_file)
        self._temporary = f"{self._path}.{os.getpid()}.tmp"
        self._file = open(self._temporary, "wb", 1 << 20)
        self._sizes, self._bytes = array("i"), 0
        self._forget = weakref.finalize(
            self, _discard, self._file, self._temporary, os.getpid()
        )

    def add_item(self, tensor: Any) -> None:
        """Append an item.

        Args:
            tensor: A tensor or array of whole numbers.

        Raises:
            ValueError: a value that the data set's dtype does not hold.
        """
        values = np.asarray(tensor)
        item = np.ascontiguousarray(values, self._dtype)
        if not np.array_equal(item, values, equal_nan=self._dtype.kind == "f"):
            raise ValueError(
                f"item {len(self._sizes)} of {self._path} holds values that "
                f"{self._dtype} does not: choose a wider dtype, or give make_builder "
                "the vocab_size"
            )
        self._file.write(item.data)
        self._bytes += item.nbytes
        self._sizes.append(item.size)

    def merge_file_(self, another_file: str) -> None:
        """Append the items of another data set.

        Args:
            another_file (str): Its PREFIX.

        Raises:
            ValueError: its elements have another dtype, or its items overlap or leave
                gaps.
        """
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
        with open(data, "rb") as file:
            shutil.copyfileobj(file, self._file, 1 << 20)
        self._bytes += used
        self._sizes.extend(other.sizes.tolist())

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """Write the index and give both files their names.

        Args:
            index_file (str | os.PathLike[str]): The .idx file.
        """
        sizes = np.array(self._sizes, np.int32)
        ends = np.cumsum(sizes, dtype=np.int64) * self._dtype.itemsize
        offsets = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        header = _HEADER.pack(MMapIndex._HDR_MAGIC, 1, self._code, len(sizes))
        self._commit(index_file, [header, sizes.astype("<i4"), offsets.astype("<i8")])

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


__all__ = [
    "IndexedRawTextDataset",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "best_fitting_int_dtype",
    "data_file_path",
    "dataset_exists",
    "get_available_dataset_impl",
    "index_file_path",
    "infer_dataset_impl",
    "make_builder",
    "make_dataset",
]

_HUFFMAN_MAGIC = b"HUFFIDX\x00"
_TORCHNET_MAGIC = b"TNTIDX\x00\x00"
_TORCHNET = "it is TorchNet's format, which fairseq wrote before mmap"
_REJECTED = {
    "cached": _TORCHNET,
    "lazy": _TORCHNET,
    "fasta": "it reads FASTA files of letters, for which there is no encoder here",
    "huffman": "its elements are Huffman codes, for which there is no decoder here",
}


class IndexedRawTextDataset(SizedDataset):
    r"""A text file, a line an item, encoded by `dictionary` when it is opened.

    Args:
        path (str): The file.
        dictionary: Has encode_line(line, add_if_not_exist, append_eos, reverse_order),
            which returns a tensor.
        append_eos (bool, default True): Add </s> to each line.
        reverse_order (bool, default False): Turn the words round.

    Example:
        >>> from ctrainer.fairseq.data import Dictionary, IndexedRawTextDataset
        >>> words = Dictionary()
        >>> index = words.add_symbol("hello")
        >>> with open("text.txt", "w") as file:
        ...     size = file.write("hello world\n")
        >>> IndexedRawTextDataset("text.txt", words)[0]
        tensor([4, 3, 2])
    """

    def __init__(
        self,
        path: str,
        dictionary: Any,
        append_eos: bool = True,
        reverse_order: bool = False,
    ) -> None:
        self.append_eos = append_eos
        self.reverse_order = reverse_order
        self.read_data(path, dictionary)

    def read_data(self, path: str, dictionary: Any) -> None:
        """Read and encode the lines.

        Args:
            path (str): The file.
            dictionary: Encodes a line.
        """
        with open(path, encoding="utf-8") as file:
            self.lines = [line.strip("\n") for line in file]
        self.tokens_list = [
            dictionary.encode_line(
                line,
                add_if_not_exist=False,
                append_eos=self.append_eos,
                reverse_order=self.reverse_order,
            ).long()
            for line in self.lines
        ]
        self.sizes = np.array([len(tokens) for tokens in self.tokens_list], np.int64)

    def check_index(self, i: int) -> None:
        """Check that there is such a line.

        Args:
            i (int): From 0.

        Raises:
            IndexError: there is none.
        """
        if not 0 <= i < len(self.lines):
            raise IndexError(f"index {i} is out of range of {len(self.lines)} lines")

    def __getitem__(self, i: int) -> Any:
        self.check_index(i)
        return self.tokens_list[i]

    def get_original_text(self, i: int) -> str:
        """Return a line as it is in the file.

        Args:
            i (int): From 0.
        """
        self.check_index(i)
        return self.lines[i]

    def __len__(self) -> int:
        return len(self.lines)

    @staticmethod
    def exists(path: str) -> bool:
        """Return whether there is a file of that name.

        Args:
            path (str): The file.
        """
        return os.path.exists(path)


def best_fitting_int_dtype(max_int_to_represent: int | None) -> Any:
    """Return the dtype for tokens below a number: uint16 below 65500, uint32 below
    2**32 - 1 or for None, else int64.

    Args:
        max_int_to_represent (int | None): The number.
    """
    if max_int_to_represent is None:
        return np.uint32
    if max_int_to_represent < 65500:
        return np.uint16
    return np.uint32 if max_int_to_represent < 4294967295 else np.int64


def get_available_dataset_impl() -> list[str]:
    """Return the kinds of data sets that can be read."""
    return ["raw", "mmap"]


def infer_dataset_impl(path: str) -> str | None:
    """Return what a data set is.

    "raw" for a file of that name, "cached", "mmap" or "huffman" by the first bytes of
    PATH.idx, "fasta" for PATH.fasta, None for neither.

    Args:
        path (str): PATH.
    """
    if IndexedRawTextDataset.exists(path):
        return "raw"
    if pair_exists(path):
        with open(index_file_path(path), "rb") as file:
            magic = file.read(8)
        known = {
            _TORCHNET_MAGIC: "cached",
            MMapIndexedDataset.Index._HDR_MAGIC[:8]: "mmap",
            _HUFFMAN_MAGIC: "huffman",
        }
        return known.get(magic)
    return "fasta" if os.path.exists(path + ".fasta") else None


def make_dataset(
    path: str,
    impl: str | None,
    fix_lua_indexing: bool = False,
    dictionary: Any = None,
) -> Any:
    """Return a data set, opened; None where there is none of that kind.

    Args:
        path (str): The file or PREFIX.
        impl (str | None): "raw" (needs the dictionary) or "mmap".
        fix_lua_indexing (bool, default False): Of TorchNet's format; changes nothing of
            these.
        dictionary (default None): Encodes the lines of "raw".

    Raises:
        ValueError: fairseq's other kinds, and a file that is not what impl says.
    """
    if impl in _REJECTED:
        raise ValueError(
            f"{path}: data sets of kind {impl!r} cannot be read: {_REJECTED[impl]}; "
            "binarise the text with --dataset-impl mmap"
        )
    if impl is None or not dataset_exists(path, impl):
        return None
    if impl == "raw":
        if dictionary is None:
            raise ValueError(f"{path}: a raw data set needs a dictionary to encode it")
        return IndexedRawTextDataset(path, dictionary)
    if impl == "mmap":
        return MMapIndexedDataset(path)
    return None


def dataset_exists(path: str, impl: str) -> bool:
    """Return whether there is a data set.

    Args:
        path (str): The file or PREFIX.
        impl (str): "raw", or else a pair of .idx and .bin.
    """
    if impl == "raw":
        return IndexedRawTextDataset.exists(path)
    return pair_exists(path)


def make_builder(
    out_file: str | os.PathLike[str], impl: str, vocab_size: int | None = None
) -> MMapIndexedDatasetBuilder:
    """Return a builder, of the narrowest dtype for the vocabulary.

    Args:
        out_file (str | os.PathLike[str]): The .bin file.
        impl (str): "mmap".
        vocab_size (int | None, default None): Words; None: uint32.

    Raises:
        ValueError: another `impl`.
    """
    if impl != "mmap":
        raise ValueError(f"no builder makes data sets of kind {impl!r}: choose mmap")
    return MMapIndexedDatasetBuilder(out_file, best_fitting_int_dtype(vocab_size))
