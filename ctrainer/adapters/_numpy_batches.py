"""Batches of arrays, their order and position, without a framework."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ctrainer.adapters import lengths, reading
from ctrainer.adapters.batch_shard import BatchShard
from ctrainer.adapters.generators import place_word
from ctrainer.adapters.lengths import TokenBatches, as_lengths
from ctrainer.arguments.accelerator import BatchPlan
from ctrainer.runtime.hooks import rows_by_name


class SequentialSampler:
    """0, 1, ..., n - 1."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset)))


class SeededSampler(SequentialSampler, reading.SeededOrder):
    """A permutation, new for each epoch, that depends on seed and epoch alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch])
        self.epoch += 1
        return lengths.indices(order.permutation(len(self.dataset)))


class LengthGroupedSampler(SequentialSampler):
    """Indices shuffled, then grouped by length, as `lengths.group` does."""

    def __init__(
        self, batch_size: int, lengths: Sequence[int], seed: int | None = None
    ) -> None:
        super().__init__(as_lengths(lengths))
        self.batch_size = batch_size
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        seed = np.random.randint(2**31) if self.seed is None else self.seed
        order = np.random.default_rng(seed).permutation(len(self))
        lengths.group(order, self.dataset, self.batch_size)
        return lengths.indices(order)


class DataLoader:
    """Batches of a data set, read in the training process.

    dataset has examples by index, in the sampler's order, or is an iterable and then
    taken as it comes. sampler: of indices, or TokenBatches, which have batches of their
    own. plan: how the batches are sharded to several ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        sampler: Any,
        collate_fn: Callable[[list[Any]], Any],
        drop_last: bool = False,
        plan: BatchPlan | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = None if isinstance(sampler, TokenBatches) else batch_size
        self.sampler = sampler
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self._shard: BatchShard | None = None
        if plan is not None:
            self._shard = BatchShard(
                plan.rank, plan.world_size, self.batch_size, plan.split_batches,
                plan.even_batches, drop_last and plan.drops_last,
            )  # fmt: skip

    def __len__(self) -> int:
        n = len(self.dataset if self.sampler is None else self.sampler)
        if self.batch_size is not None:
            n = n // self.batch_size if self.drop_last else -(-n // self.batch_size)
        return n if self._shard is None else self._shard.count(n)

    def __iter__(self) -> Iterator[Any]:
        return self.batches(0)

    def batches(
        self, skip: int, begin: Callable[[int], None] | None = None
    ) -> Iterator[Any]:
        """Batches from number `skip` on; what comes before is not read where examples
        have an index. begin: called with each batch's number before it is read, after
        its indices are known."""
        mine: Iterator[list[Any]] = self._lists()
        if self._shard is not None:
            mine = self._shard.of(mine)
        next(itertools.islice(mine, skip, skip), None)
        return self._read(mine, skip, begin)

    def _read(
        self, mine: Iterator[Any], skip: int, begin: Callable[[int], None] | None
    ) -> Iterator[Any]:
        for at in itertools.count(skip):
            if begin is not None and self.sampler is None:
                begin(at)  # the examples are read with their batch
            batch = next(mine, None)
            if batch is None:
                return
            if begin is not None and self.sampler is not None:
                begin(at)
            if self.sampler is not None:
                batch = [self.dataset[i] for i in batch]
            yield self.collate_fn(batch)

    def _lists(self) -> Iterator[list[Any]]:
        """The batches of all ranks, of indices where examples have one."""
        source = iter(self.dataset if self.sampler is None else self.sampler)
        if self.batch_size is None:
            yield from source
            return
        while batch := list(itertools.islice(source, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


def default_collator(features: list[Any]) -> dict[str, Any]:
    """Stack the features of examples, mappings or objects with attributes, by name.

    `label` and `label_ids` become `labels`: int64, or float32 for floats. Strings and
    None are left out.
    """
    rows = rows_by_name(features)
    first, batch = rows[0], {}
    for name, value in first.items():
        if value is None or isinstance(value, str):
            continue
        stacked = np.stack([np.asarray(row[name]) for row in rows])
        if name in ("label", "label_ids"):
            whole = stacked.dtype.kind in "iub"
            batch["labels"] = stacked.astype(np.int64 if whole else np.float32)
        else:
            batch[name] = stacked
    return batch


class LoaderReader(reading.Reader):
    """Of a DataLoader of arrays; only its rows are drawn for by their place, its order
    comes from the run's generators."""

    loader: DataLoader

    def start(self, epoch: int, skip: int, state: Mapping[str, Any] | None) -> Self:
        self._at_begin(epoch)
        state = state or {}
        self.check(state, skip)
        indexed = self.loader.sampler is not None
        self.place = skip if indexed else 0
        if indexed:
            self._know_draws(state)
        begin = None if self._draws is None else self._begin_batch
        self._batches = self.loader.batches(self.place, begin)
        if skip and not indexed:
            self.read_past(skip, state.get("last"))
        return self

    def _begin_batch(self, place: int) -> None:
        assert self._draws is not None
        assert self.seed is not None
        if not self._draws.due(place):
            return
        if self.loader.sampler is not None:
            place = place * self.world_size + self.rank
        self._draws.begin(place_word(self.seed, self.epoch, place))

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        finally:
            if self._draws is not None:
                self._draws.end()
        self._last = reading.batch_digest(batch)
        self.place += 1
        return batch
