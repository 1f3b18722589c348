"""Text files in chunks of whole lines, counted and encoded by several processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T")


def find_offsets(filename: str | os.PathLike[str], num_chunks: int) -> list[int]:
    """num_chunks + 1 positions in bytes, each the beginning of a line or the end."""
    size = os.path.getsize(filename)
    offsets = [0]
    with open(filename, "rb") as file:
        for i in range(1, num_chunks):
            file.seek(max(size * i // num_chunks - 1, 0))
            file.readline()  # to the end of the line that holds the byte before
            offsets.append(min(max(file.tell(), offsets[-1]), size))
    return [*offsets, size]


def lines_between(
    filename: str | os.PathLike[str], start: int, end: int
) -> Iterator[str]:
    """The lines that begin at bytes [start, end). Raises ValueError, naming file and
    byte, where one is not UTF-8."""
    with open(filename, "rb") as file:
        file.seek(start)
        at = start
        while at < end:
            line = file.readline()
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{filename}: the line at byte {at} is not UTF-8: {error}"
                ) from error
            at += len(line)


def in_processes(
    job: Callable[..., T], chunks: Sequence[Iterable[Any]], workers: int
) -> list[T]:
    """job(*chunk) of each chunk, in that many processes; with one, in this one."""
    if workers <= 1:
        return [job(*chunk) for chunk in chunks]
    # Forking is quick, and safe while nothing else runs that could hold a lock.
    how = "fork" if threading.active_count() == 1 else "spawn"
    with multiprocessing.get_context(how).Pool(workers) as pool:
        return pool.starmap(job, chunks)


def count_words(
    filename: str | os.PathLike[str],
    tokenize: Callable[[str], Iterable[str]],
    eos_word: str,
    workers: int,
) -> Counter[str]:
    """How often each word of a file is there, and eos_word once a line."""
    chunks = [
        (filename, tokenize, eos_word, *ends)
        for ends in pairwise(find_offsets(filename, max(workers, 1)))
    ]
    return sum(in_processes(_count, chunks, workers), Counter[str]())


def _count(
    filename: str | os.PathLike[str],
    tokenize: Callable[[str], Iterable[str]],
    eos_word: str,
    start: int,
    end: int,
) -> Counter[str]:
    counter: Counter[str] = Counter()
    for line in lines_between(filename, start, end):
        counter.update(tokenize(line))
        counter[eos_word] += 1
    return counter
