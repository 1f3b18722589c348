"""Text files as indexed data sets of words' numbers, by several processes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ctrainer.fairseq.data.text_chunks import (
    find_offsets,
    in_processes,
    lines_between,
)
from ctrainer.fairseq.indexed_dataset import (
    data_file_path,
    index_file_path,
    make_builder,
)
from ctrainer.fairseq.tokenizer import tokenize_line


@dataclass
class BinarizeSummary:
    """What became of a file: lines, words with those that end lines, and how often each
    word was replaced by <unk>."""

    num_seq: int = 0
    num_tok: int = 0
    replaced: Counter[str] = field(default_factory=Counter)

    @property
    def num_replaced(self) -> int:
        return sum(self.replaced.values())

    @property
    def replaced_percent(self) -> float:
        return 100 * self.num_replaced / self.num_tok if self.num_tok else 0.0

    def merge(self, other: BinarizeSummary) -> None:
        self.num_seq += other.num_seq
        self.num_tok += other.num_tok
        self.replaced.update(other.replaced)


def binarize_file(
    filename: str,
    dictionary: Any,
    prefix: str,
    dataset_impl: str = "mmap",
    workers: int = 1,
) -> BinarizeSummary:
    """Write PREFIX.bin and PREFIX.idx: an item a line, </s> at its end.

    The files are the same for any number of workers, and appear when they are whole.
    """
    offsets = find_offsets(filename, max(workers, 1))
    parts = [f"{prefix}.part{i}" for i in range(1, len(offsets) - 1)]
    chunks = [
        (filename, dictionary, part, dataset_impl, *ends)
        for part, ends in zip([prefix, *parts], pairwise(offsets), strict=True)
    ]
    if workers <= 1:
        return _binarize(*chunks[0])
    chunks[0] = (filename, dictionary, f"{prefix}.part0", dataset_impl, *offsets[:2])
    parts.insert(0, f"{prefix}.part0")
    try:
        summaries = in_processes(_binarize, chunks, workers)
        _join(prefix, parts, dataset_impl, len(dictionary))
    finally:
        _remove(parts)
    total = BinarizeSummary()
    for summary in summaries:
        total.merge(summary)
    return total


def _binarize(
    filename: str, dictionary: Any, prefix: str, impl: str, start: int, end: int
) -> BinarizeSummary:
    """One chunk of a file as a data set of its own."""
    builder = make_builder(data_file_path(prefix), impl, len(dictionary))
    summary, eos, unk = BinarizeSummary(), dictionary.eos(), dictionary.unk()
    indices = dictionary.indices
    for line in lines_between(filename, start, end):
        words = tokenize_line(line)
        ids = [indices.get(word, unk) for word in words]
        if unk in ids:
            pairs = zip(words, ids, strict=True)
            summary.replaced.update(
                word for word, i in pairs if i == unk and word != dictionary.unk_word
            )
        ids.append(eos)
        builder.add_item(np.array(ids, np.int64))
        summary.num_seq += 1
        summary.num_tok += len(ids)
    builder.finalize(index_file_path(prefix))
    return summary


def _join(prefix: str, parts: list[str], impl: str, words: int) -> None:
    builder = make_builder(data_file_path(prefix), impl, words)
    for part in parts:
        builder.merge_file_(part)
    builder.finalize(index_file_path(prefix))


def _remove(parts: list[str]) -> None:
    for part in parts:
        for path in (data_file_path(part), index_file_path(part)):
            if os.path.exists(path):
                os.remove(path)
