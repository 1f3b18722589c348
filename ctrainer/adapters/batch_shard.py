"""One rank's part of a stream of batches.

Source of the rules: accelerate 1.x, data_loader.py, BatchSamplerShard, whose parts
these are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchShard:
    """The rule by which a rank takes its part of all batches.

    Batches come in rounds, so that all ranks get equally many: a round is world_size
    batches, one for each rank in order, or with `split` one batch, of which every rank
    gets an equal part. The last round may be short: fewer batches, or a last one with
    fewer items.

    Args:
        batch_size: items of a whole batch; None for batches of any length.
        even: fill a short round from the beginning of the stream, again and again if
            that is too short, so that all ranks have equally many batches of one
            length; of batches of any length, with whole batches.
        drop_last: leave a short round out.

    Raises:
        ValueError: the rank is out of range, or batches cannot be split.
    """

    rank: int
    world_size: int
    batch_size: int | None = None
    split: bool = False
    even: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank}; expected one in [0, {self.world_size})"
            )
        size = self.batch_size or 0
        if self.split and (size == 0 or size % self.world_size):
            raise ValueError(
                f"split_batches shards every batch to {self.world_size} ranks, and a "
                f"batch has {size} items; make that a multiple of the ranks"
            )

    @property
    def _round(self) -> int:
        """Batches in a round."""
        return 1 if self.split else self.world_size

    def count(self, n: int) -> int:
        """How many batches the rank gets of n, which are whole but for the last."""
        rounds, rest = divmod(n, self._round)
        if rest == 0 or self.drop_last:
            return rounds
        return rounds + (self.even or self.rank < rest)

    def of(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        """The rank's batches, lists, of a stream of sequences. Nothing is read before
        the round that needs it, but for one batch after a short one."""
        stream = map(list, batches)
        beginning: list[Any] | None = None  # its items, or batches of any length
        ahead: list[Any] = []
        while current := [*ahead, *itertools.islice(stream, self._round - len(ahead))]:
            if beginning is None:
                fills = self.even and not self.drop_last
                flat = itertools.chain.from_iterable(current)
                beginning = list(current if self.batch_size is None else flat)
                beginning = beginning if fills else []
            is_short = self._is_short(current)
            ahead = list(itertools.islice(stream, 1)) if is_short else []
            is_last = is_short and not ahead
            part = self._part(current, beginning, is_last)
            if part is not None:
                yield part
            if is_last:
                return

    def _is_short(self, batches: list[list[Any]]) -> bool:
        size = self.batch_size or 0
        return len(batches) < self._round or len(batches[-1]) < size

    def _part(
        self, batches: list[list[Any]], beginning: list[Any], is_last: bool
    ) -> list[Any] | None:
        n, rank, size = len(batches), self.rank, self.batch_size or 0
        is_short = self._is_short(batches)
        if is_last and self.drop_last:
            return None
        if self.split:
            each, of = size // self.world_size, batches[0]
            part = of[rank * each : (rank + 1) * each]
            if is_short and self.even:
                return _fill(part, each, beginning, max(rank * each - len(of), 0))
            return part or None
        if not is_last or not self.even or rank < n - (size > 0):
            return batches[rank] if rank < n else None
        if size == 0:
            return list(beginning[(rank - n) % len(beginning)])
        missing = max(size - len(batches[-1]), 0)  # of the last batch
        if rank == n - 1:
            return _fill(batches[rank], size, beginning, 0)
        return _fill([], size, beginning, missing + (rank - n) * size)


def _fill(part: list[Any], n: int, beginning: list[Any], start: int) -> list[Any]:
    """Fill `part` up to n items from number `start` on of the beginning, repeated."""
    end = start + max(n - len(part), 0)
    return [*part, *itertools.islice(itertools.cycle(beginning), start, end)]
