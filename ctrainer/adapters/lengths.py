"""Orders and batches of rows by their length; torch is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ctrainer import _C
from ctrainer.adapters.reading import SeededOrder

_AT_ONCE = 1 << 16


class Seekable:
    """An order that goes to a place without making what lies before it."""

    def after(self, n: int, keep: int = 0) -> Iterator[Any]:
        """The order without what lies from number `keep` up to number n."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.after(0)


def as_lengths(lengths: Any) -> np.ndarray:
    """Lengths, numbers of any kind, as int32 that order the rows alike: numbers that
    are no int32 become their ranks."""
    values = np.asarray(lengths)
    if values.dtype.kind in "iub" and np.can_cast(values.dtype, np.int32):
        return np.ascontiguousarray(values, np.int32)
    bounds = np.iinfo(np.int32)
    whole = values.dtype.kind in "iu" and values.size > 0
    if whole and bounds.min <= values.min() and values.max() <= bounds.max:
        return values.astype(np.int32)
    return np.unique(values, return_inverse=True)[1].astype(np.int32)


def indices(order: np.ndarray, n: int = 0, keep: int = 0) -> Iterator[int]:
    """The order's numbers without those from number `keep` up to number n. Only some
    are Python's at a time: all of 10**8 take 4 GB, and longer than to draw them."""
    for part in (order[:keep], order[n:]):
        for at in range(0, len(part), _AT_ONCE):
            yield from part[at : at + _AT_ONCE].tolist()


def group(order: np.ndarray, lengths: np.ndarray, batch_size: int) -> None:
    """Sort an order, in place, by length within chunks of 50 batches, or of a
    quarter of the rows if that is less, so that a batch needs little padding; the
    longest row comes first.

    Source: transformers 5.17, get_length_grouped_indices.
    """
    chunk = max(min(len(order) // (batch_size * 4), 50), 1) * batch_size
    _C.order_by_length(order, lengths, chunk, True)


def longest_first(lengths: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """All rows, sorted by descending length; of one length as in `order`."""
    order = np.arange(len(lengths)) if order is None else order
    _C.order_by_length(order, lengths, max(len(order), 1), False)
    return order


class LongestFirst(Seekable):
    """A sampler of all rows, the longest first: for an evaluation, whose results go
    back to the data set's order by `order`."""

    def __init__(self, lengths: Any) -> None:
        self.order = longest_first(as_lengths(lengths))

    def __len__(self) -> int:
        return len(self.order)

    def after(self, n: int, keep: int = 0) -> Iterator[int]:
        return indices(self.order, n, keep)


class TokenBatches(Seekable, SeededOrder):
    """Batches of rows of like length, of at most max_tokens tokens each: rows times the
    longest row's, as a batch is padded; or with `packed` of any rows, by their sum.

    The batches of a run are the same in each epoch; their order follows from the seed
    and the epoch. Without a seed the longest are first, and `order` has all rows.

    Args:
        lengths (sequence of int): Tokens of each row, above 0.
        max_tokens (int): Of a batch.
        packed (bool, default False): Rows are joined, not padded.
        seed (int | None, default None): Of the order.

    Raises:
        ValueError: a row has more than max_tokens.

    Source: fairseq, data/data_utils_fast.pyx, for the batches.
    """

    batch_size = None
    drop_last = False

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        packed: bool = False,
        seed: int | None = None,
    ) -> None:
        tokens = np.asarray(lengths)
        if tokens.dtype.kind not in "iu" or not len(tokens) or tokens.min() < 0:
            raise ValueError(
                "max_tokens_per_batch needs the number of tokens of each row, whole "
                f"numbers of 0 or more; got {tokens.dtype} of shape {tokens.shape}"
            )
        longest = int(tokens.argmax())
        if tokens[longest] > max_tokens:
            raise ValueError(
                f"row {longest} has {tokens[longest]} tokens and a batch at most "
                f"max_tokens_per_batch={max_tokens}; raise that, or truncate the rows"
            )
        self.max_tokens, self.packed = max_tokens, packed
        self.lengths = tokens.astype(np.int32)
        self.shuffles = seed is not None
        self.seed, self.epoch = seed or 0, 0
        self._made: tuple[int, list[np.ndarray]] = (self.seed, self._cut())

    def _cut(self) -> list[np.ndarray]:
        n = len(self.lengths)
        drawn = np.random.default_rng(self.seed).permutation(n)
        order = drawn if self.shuffles else None
        if self.packed:  # where rows of unlike length cost no padding
            self.order = np.arange(n) if order is None else order
            sizes = self.lengths[self.order].astype(np.int64)
            return _by_sum(self.order, sizes, self.max_tokens)
        self.order = longest_first(self.lengths, order)
        sizes = self.lengths[self.order].astype(np.int64)
        return _C.batch_by_size(self.order, sizes, self.max_tokens, 0, 1)

    @property
    def batches(self) -> list[np.ndarray]:
        """Those of the seed, which a resumed run takes over."""
        if self._made[0] != self.seed:
            self._made = self.seed, self._cut()
        return self._made[1]

    @property
    def sampler(self) -> TokenBatches:
        """The order is its own, as a BatchSampler's is its sampler's."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches)

    def after(self, n: int, keep: int = 0) -> Iterator[list[int]]:
        order = np.arange(len(self.batches))
        if self.shuffles:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        self.epoch += 1
        for at in indices(order, n, keep):
            yield self.batches[at].tolist()


def _by_sum(order: np.ndarray, sizes: np.ndarray, most: int) -> list[np.ndarray]:
    """Consecutive parts of the order, each of as many rows as have `most` tokens."""
    ends, parts, begin = np.cumsum(sizes), [], 0
    while begin < len(order):
        used = 0 if begin == 0 else ends[begin - 1]
        end = int(np.searchsorted(ends, used + most, side="right"))
        parts.append(order[begin:end])
        begin = end
    return parts
