"""Iterators that know how far they are and how long."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any, Self

logger = logging.getLogger(__name__)


class CountingIterator:
    """Iterates over an iterable and counts.

    `n` is the number of items consumed, those before `start` included; it begins at
    `start`, or else at the iterable's own `n`, or else at 0, and nothing is skipped for
    it. `total`, the length, is `n + len(iterable)` unless given; items beyond it are
    not asked for. Raises IndexError where the iterable ends before.
    """

    def __init__(
        self,
        iterable: Any,
        start: int | None = None,
        total: int | None = None,
    ) -> None:
        self._itr = iter(iterable)
        self.n: int = start if start else getattr(iterable, "n", 0)
        self.total: int = self.n + len(iterable) if total is None else total

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.n >= self.total:
            raise StopIteration
        try:
            item = next(self._itr)
        except StopIteration:
            raise IndexError(
                f"Iterator expected to have length {self.total}, "
                f"but exhausted at position {self.n}."
            ) from None
        self.n += 1
        return item

    def has_next(self) -> bool:
        """Whether there are items left."""
        return self.n < self.total

    def skip(self, n: int) -> Self:
        """Consumes n items; StopIteration where there are fewer."""
        for _ in range(n):
            next(self)
        return self

    def take(self, n: int) -> Self:
        """Ends at item n, counted from the beginning; an iterator below follows."""
        self.total = min(self.total, n)
        if hasattr(self._itr, "take"):
            self._itr.take(max(n - self.n, 0))
        return self


def _groups(items: Iterable[Any], size: int, whole: bool) -> Iterator[list[Any]]:
    """Consecutive lists of `size` items; `whole` leaves a shorter last one out."""
    source = iter(items)
    while group := list(islice(source, size)):
        if whole and len(group) < size:
            return
        yield group


class GroupedIterator(CountingIterator):
    """Gives lists of `chunk_size` consecutive items: the micro-batches of one update.

    Counts lists: ceil(len / chunk_size) of them, beginning at ceil(n / chunk_size).
    With `skip_remainder_batch` a shorter last list is left out, floor instead of ceil,
    and the iterable is cut to what is used, so that its epoch ends with ours.
    """

    def __init__(
        self, iterable: Any, chunk_size: int, skip_remainder_batch: bool = False
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        n_items = len(iterable)
        total = (
            n_items // chunk_size if skip_remainder_batch else -(-n_items // chunk_size)
        )
        skipped = "skip final residual batch, " if skip_remainder_batch else ""
        logger.info("%sgrouped total_num_itrs = %d", skipped, total)
        super().__init__(
            _groups(iterable, chunk_size, skip_remainder_batch),
            start=-(-getattr(iterable, "n", 0) // chunk_size),
            total=total,
        )
        self.chunk_size = chunk_size
        if skip_remainder_batch and hasattr(iterable, "take"):
            iterable.take(total * chunk_size)


def check_shard(num_shards: int, shard_id: int) -> None:
    if not 0 <= shard_id < num_shards:
        raise ValueError(
            f"shard_id must be between 0 and num_shards, got {shard_id} of {num_shards}"
        )


class ShardedIterator(CountingIterator):
    """Every `num_shards`-th item from number `shard_id` on.

    Every shard has ceil(len / num_shards) items: where the iterable does not divide
    evenly, the last is `fill_value`. `skip_remainder_batch` is accepted and does
    nothing, as in fairseq. Raises ValueError for a shard that there is not.
    """

    def __init__(
        self,
        iterable: Any,
        num_shards: int,
        shard_id: int,
        fill_value: Any = None,
        skip_remainder_batch: bool | None = None,
    ) -> None:
        check_shard(num_shards, shard_id)
        own = islice(iterable, shard_id, len(iterable), num_shards)
        super().__init__(
            chain(own, repeat(fill_value)),
            start=-(-getattr(iterable, "n", 0) // num_shards),
            total=-(-len(iterable) // num_shards),
        )
