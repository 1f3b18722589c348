"""Binarised data sets by the names of fairseq's data/indexed_dataset.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ctrainer.fairseq._file_pair import data_file_path, index_file_path, pair_exists
from ctrainer.fairseq._mmap_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from ctrainer.fairseq.fairseq_dataset import FairseqDataset

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
_REFUSED = {
    "cached": _TORCHNET,
    "lazy": _TORCHNET,
    "fasta": "it reads FASTA files of letters, for which there is no encoder here",
    "huffman": "its elements are Huffman codes, for which there is no decoder here",
}


class IndexedRawTextDataset(FairseqDataset):
    """A text file, a line an item, encoded by `dictionary` when it is opened.

    dictionary: has encode_line(line, add_if_not_exist, append_eos, reverse_order),
    which returns a tensor. The lines are kept too: get_original_text(i).
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
        if not 0 <= i < len(self.lines):
            raise IndexError(f"index {i} is out of range of {len(self.lines)} lines")

    def __getitem__(self, i: int) -> Any:
        self.check_index(i)
        return self.tokens_list[i]

    def get_original_text(self, i: int) -> str:
        self.check_index(i)
        return self.lines[i]

    def __len__(self) -> int:
        return len(self.lines)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    @staticmethod
    def exists(path: str) -> bool:
        return os.path.exists(path)


def best_fitting_int_dtype(max_int_to_represent: int | None) -> Any:
    """The dtype for tokens below that number: uint16 below 65500, uint32 below 2**32 -
    1 or for None, else int64."""
    if max_int_to_represent is None:
        return np.uint32
    if max_int_to_represent < 65500:
        return np.uint16
    return np.uint32 if max_int_to_represent < 4294967295 else np.int64


def get_available_dataset_impl() -> list[str]:
    return ["raw", "mmap"]


def infer_dataset_impl(path: str) -> str | None:
    """What the data set at `path` is: "raw" for a file of that name, "cached", "mmap"
    or "huffman" by the first bytes of PATH.idx, "fasta" for PATH.fasta, None for
    neither."""
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
    """Opens a data set; None where there is none of that kind at `path`.

    impl: "raw" (needs the dictionary) or "mmap". fix_lua_indexing is of TorchNet's
    format, and changes nothing of these. Raises ValueError
    for fairseq's other kinds, and for a file that is not what impl says.
    """
    if impl in _REFUSED:
        raise ValueError(
            f"{path}: data sets of kind {impl!r} cannot be read: {_REFUSED[impl]}; "
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
    if impl == "raw":
        return IndexedRawTextDataset.exists(path)
    return pair_exists(path)


def make_builder(
    out_file: str | os.PathLike[str], impl: str, vocab_size: int | None = None
) -> MMapIndexedDatasetBuilder:
    """A builder of the .bin file `out_file`, of the narrowest dtype for the vocabulary.

    Raises ValueError for an `impl` other than "mmap".
    """
    if impl != "mmap":
        raise ValueError(f"no builder makes data sets of kind {impl!r}: choose mmap")
    return MMapIndexedDatasetBuilder(out_file, best_fitting_int_dtype(vocab_size))
