"""Batches by size, collation and reading of binarised data, against fairseq's.

The peer of batch_by_size is fairseq's Cython module where it can be imported, as
fairseq.data.data_utils_fast or, built alone, as data_utils_fast; else the rule written
out in Python. Those of the rest are fairseq's algorithms in torch and NumPy, stated
here. The two take turns; each figure is the median of the turns. Prints JSON lines.
"""

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ctrainer import _C
from ctrainer.fairseq.data_utils import collate_tokens
from ctrainer.fairseq.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
)

SAMPLES, MEAN_LENGTH, LONGEST = 1_000_000, 30, 400
LIMITS = {"4096 tokens": (4096, -1, 8), "32 sentences": (-1, 32, 1)}
GOAL = 1.0  # no slower
ITEMS = 20_000


def by_the_rule(
    indices: Any, lengths: Any, max_tokens: int, max_sentences: int, multiple: int
) -> list[Any]:
    """What fairseq documents, one sample after the other."""
    batches, start, sizes = [], 0, lengths.tolist()
    while start < len(sizes):
        longest, end = 0, start
        while end < len(sizes):
            longest, count = max(longest, sizes[end]), end - start + 1
            if longest * count > max_tokens > 0 or count > max_sentences > 0:
                break
            end += 1
        if end - start > multiple:
            end -= (end - start) % multiple
        batches.append(indices[start:end])
        start = end
    return batches


def rule_by_function(indices: Any, function: Any, *limits: int) -> list[Any]:
    lengths = np.fromiter(map(function, indices.tolist()), np.int64)
    return by_the_rule(indices, lengths, *limits)


def peer() -> tuple[str, Any, Any]:
    """Its name, and what it has for a vector of lengths and for a function."""
    for name in ("fairseq.data.data_utils_fast", "data_utils_fast"):
        try:
            cython = importlib.import_module(name)
        except Exception:  # fairseq fails to import in more ways than one
            continue
        return "fairseq's Cython", cython.batch_by_size_vec, cython.batch_by_size_fn
    return "the rule in Python", by_the_rule, rule_by_function


def padded(values: list[torch.Tensor], pad: int) -> torch.Tensor:
    """fairseq's way: rows of a filled tensor, copied one by one."""
    out = values[0].new(len(values), max(v.size(0) for v in values)).fill_(pad)
    for i, value in enumerate(values):
        out[i][: len(value)].copy_(value)
    return out


class Unchecked:
    """fairseq's way of reading: a view by size and offset, then a tensor of int64."""

    def __init__(self, prefix: str) -> None:
        index = memoryview(np.memmap(prefix + ".idx", mode="r"))  # type: ignore[arg-type]
        n = int.from_bytes(index[18:26], "little")
        self.sizes = np.frombuffer(index, np.int32, n, offset=26)
        self.offsets = np.frombuffer(index, np.int64, n, offset=26 + 4 * n)
        self.data = memoryview(np.memmap(prefix + ".bin", mode="r"))  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> torch.Tensor:
        offset, size = self.offsets[i], self.sizes[i]
        item = np.frombuffer(self.data, np.uint16, size, offset)
        return torch.from_numpy(item.astype(np.int64))


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(
    name: str,
    against: str,
    unit: str,
    scale: float,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    rounds: int,
) -> None:
    """Prints both times in `unit`s, of which `scale` make a second."""
    ours(), theirs()
    turns = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    mine, other = (statistics.median(t) for t in zip(*turns, strict=True))
    row = {
        "benchmark": "batches",
        "name": name,
        "unit": unit,
        "ours": mine * scale,
        "peer": against,
        "theirs": other * scale,
        "ratio": other / mine,
        "goal": GOAL,
    }
    print(json.dumps(row), flush=True)


def measure_batching(rounds: int) -> None:
    random = np.random.default_rng(0)
    indices = random.permutation(SAMPLES)
    lengths = np.minimum(random.geometric(1 / MEAN_LENGTH, SAMPLES), LONGEST)
    against, by_vector, by_function = peer()
    for what, limits in LIMITS.items():
        compare(
            f"batch_by_size, 1M samples, {what}", against, "ms", 1e3,
            lambda limits=limits: _C.batch_by_size(indices, lengths, *limits),
            lambda limits=limits: by_vector(indices, lengths, *limits),
            rounds,
        )  # fmt: skip
    compare(
        "batch_by_size, 1M samples, lengths by a function", against, "ms", 1e3,
        lambda: _C.batch_by_size(indices, lengths.__getitem__, 4096, -1, 8),
        lambda: by_function(indices, lengths.__getitem__, 4096, -1, 8),
        rounds,
    )  # fmt: skip


def measure_collation(rounds: int) -> None:
    lengths = np.random.default_rng(0).integers(10, 60, 64)
    values = [torch.arange(n) for n in lengths.tolist()]
    times = 100
    compare(
        "collate_tokens, 64 sentences", "fairseq's loop in torch", "us", 1e6 / times,
        lambda: [collate_tokens(values, 1) for _ in range(times)],
        lambda: [padded(values, 1) for _ in range(times)],
        rounds,
    )  # fmt: skip


def measure_reading(rounds: int) -> None:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "train")
        builder = MMapIndexedDatasetBuilder(prefix + ".bin", np.uint16)
        for n in random.geometric(1 / MEAN_LENGTH, ITEMS).tolist():
            builder.add_item(random.integers(0, 60_000, n))
        builder.finalize(prefix + ".idx")
        ours, theirs = MMapIndexedDataset(prefix), Unchecked(prefix)
        order = random.permutation(ITEMS).tolist()
        compare(
            "an item of a mapped data set", "fairseq's views", "us", 1e6 / ITEMS,
            lambda: [ours[i] for i in order],
            lambda: [theirs[i] for i in order],
            rounds,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_batching(options.rounds)
    measure_collation(options.rounds)
    measure_reading(options.rounds)


if __name__ == "__main__":
    main()
