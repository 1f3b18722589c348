"""torch's data loaders on several ranks: each rank's part of the batches.

Source of who gets what: accelerate 1.x, data_loader.py (BatchSamplerShard,
IterableDatasetShard, DataLoaderDispatcher), whose batches these are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ctrainer import _C
from ctrainer.adapters._torch_batches import (
    DrawnSampler,
    LengthGroupedSampler,
    after,
)
from ctrainer.adapters._torch_rank_eval import WholeBatchLoader, receive, scatter
from ctrainer.adapters.batch_shard import BatchShard
from ctrainer.adapters.lengths import Seekable, TokenBatches
from ctrainer.arguments.accelerator import BatchPlan


class RankBatches(BatchSampler, Seekable):
    """This rank's batches of a batch sampler that all ranks have alike."""

    def __init__(self, batch_sampler: Any, plan: BatchPlan) -> None:
        self.batch_sampler = batch_sampler
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.plan = plan
        self._shard = BatchShard(
            plan.rank, plan.world_size, self.batch_size, plan.split_batches,
            plan.even_batches, self.drop_last and plan.drops_last,
        )  # fmt: skip

    def __iter__(self) -> Iterator[list[int]]:
        return self.after(0)

    def after(self, n: int, keep: int = 0) -> Iterator[list[int]]:
        """The first round is read all the same, since the last round is filled from
        it."""
        if n <= 1:
            every = self._shard.of(after(self.batch_sampler, 0))
            return itertools.islice(every, n - keep, None)
        whole = 1 if self.plan.split_batches else self.plan.world_size
        batches = after(self.batch_sampler, n * whole, max(keep, 1) * whole)
        found = self._shard.of(batches)
        return found if keep else itertools.islice(found, 1, None)

    def __len__(self) -> int:
        return self._shard.count(len(self.batch_sampler))


class RankStream(IterableDataset[Any]):
    """This rank's examples of a stream that all ranks read: of each world_size batches
    one, or of each batch a part. The last are filled up from the first, where batches
    are to be even."""

    def __init__(
        self, dataset: Any, batch_size: int, drop_last: bool, plan: BatchPlan
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.drop_last = drop_last and plan.drops_last
        self.round = batch_size * (
            1 if plan.split_batches else plan.world_size
        )  # examples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        n, part = len(self.dataset), self.round // self.plan.world_size
        rounds = n // self.round if self.drop_last else -(-n // self.round)
        return rounds * part

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(
            self.dataset, "set_epoch"
        ):
            generator.manual_seed(self.epoch)
        shard = BatchShard(
            self.plan.rank, self.plan.world_size, self.round, split=True,
            even=self.plan.even_batches, drop_last=self.drop_last,
        )  # fmt: skip
        for part in shard.of(_in_lists(self.dataset, self.round)):
            yield from part


def _in_lists(examples: Iterable[Any], n: int) -> Iterator[list[Any]]:
    stream = iter(examples)
    while part := list(itertools.islice(stream, n)):
        yield part


class DispatchedLoader(WholeBatchLoader):
    """Batches that rank 0 reads and scatters: each rank gets an equal part of the rows
    of world_size batches, or of one. Rows of the first round make the last one even, if
    batches are to be even; else its parts differ in length, or are none.

    All ranks iterate over it at the same time. Raises RuntimeError on the others when
    rank 0 cannot read on.
    """

    def __len__(self) -> int:
        n, together = len(self.loader), self.together
        return n // together if self.drop_last else -(-n // together)

    def __iter__(self) -> Iterator[Any]:
        if self.plan.rank == 0:
            return self.scatter(iter(self.loader))
        self.draw_seed()
        return self.scatter(None)

    def scatter(
        self, batches: Iterator[Any] | None, beginning: Sequence[Any] = ()
    ) -> Iterator[Any]:
        """This rank's parts of `batches`, which rank 0 has. beginning: the first
        batches of the epoch, if they have been scattered before."""
        rounds: Iterator[Any] | None = None
        if batches is not None:
            found = ((parts, False) for parts in self._parts(batches, beginning))
            rounds = itertools.chain(found, [([], True)])
        is_last = False
        while not is_last:
            parts, is_last = receive(rounds)
            part = parts[self.plan.rank] if parts else None
            if part is not None:
                yield part

    @property
    def together(self) -> int:
        """Batches that are scattered at once."""
        return 1 if self.plan.split_batches else self.plan.world_size

    def _parts(
        self, stream: Iterator[Any], beginning: Sequence[Any]
    ) -> Iterator[list[Any]]:
        """The parts of all ranks, round by round."""
        n = self.plan.world_size
        first = _rows(_joined([*beginning]), 0, n) if beginning else None
        for batches in _in_lists(stream, self.together):
            even = self.plan.even_batches
            drops = self.drop_last and self.plan.drops_last
            if len(batches) < self.together and drops:
                return
            batch = batches[0] if len(batches) == 1 else _joined(batches)
            first = _rows(batch, 0, n) if first is None else first
            if _length(batch) % n and not self.drop_last and even:
                batch = _joined([batch, first])
            rows = _length(batch)
            each = rows // n if even else -(-rows // n)
            yield [
                _rows(batch, r * each, (r + 1) * each) if r * each < rows else None
                for r in range(n)
            ]


def _each(change: Callable[[Any], Any], batches: list[Any]) -> Any:
    """A batch of what `change` makes of the tensors that are in one place of all."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return change(batches)
    if isinstance(first, Mapping):
        made = {key: _each(change, [b[key] for b in batches]) for key in first}
        return type(first)(made)  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        items = [_each(change, list(b)) for b in zip(*batches, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    raise TypeError(
        "dispatch_batches scatters tensors in mappings, lists and tuples, and a "
        f"batch has a {type(first).__name__}; set dispatch_batches to False"
    )


def _joined(batches: list[Any]) -> Any:
    """Batches of one structure, one after the other along their first dimension."""
    return _each(torch.cat, batches)


def _rows(batch: Any, start: int, end: int) -> Any:
    """Rows [start, end) of every tensor, with no more memory than they need."""
    return _each(lambda tensors: tensors[0][start:end].clone(), [batch])


def _length(batch: Any) -> int:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def rank_loader(
    dataset: Any, plan: BatchPlan, *, sampler: Any, batch_size: int, drop_last: bool,
    **options: Any,
) -> Any:  # fmt: skip
    """This rank's loader of batches of a data set that all ranks have."""
    if isinstance(dataset, IterableDataset):
        if plan.evaluates and plan.dispatch_batches is not False:
            return scatter(dataset, plan, batch_size, drop_last, options)
        return _stream_loader(dataset, plan, batch_size, drop_last, options)
    batches: Any = sampler
    if not isinstance(sampler, TokenBatches):
        sampler = SequentialSampler(dataset) if sampler is None else sampler
        batches = BatchSampler(sampler, batch_size, drop_last)
    if plan.dispatch_batches:
        loader = DataLoader(dataset, batch_sampler=batches, **options)
        return (WholeBatchLoader if plan.evaluates else DispatchedLoader)(loader, plan)
    return DataLoader(dataset, batch_sampler=RankBatches(batches, plan), **options)


def _stream_loader(
    dataset: Any, plan: BatchPlan, batch_size: int, drop_last: bool, options: Any
) -> Any:
    if plan.dispatch_batches is not False:
        loader = DataLoader(
            dataset, batch_size=batch_size, drop_last=drop_last, **options
        )
        return DispatchedLoader(loader, plan)
    n, own = plan.world_size, batch_size
    if plan.split_batches:
        own = batch_size // n
    elif getattr(dataset, "n_shards", 0) >= n and callable(
        getattr(dataset, "shard", None)
    ):
        part = dataset.shard(num_shards=n, index=plan.rank)  # of datasets
        return DataLoader(part, batch_size=own, drop_last=drop_last, **options)
    stream = RankStream(dataset, batch_size, drop_last, plan)
    return DataLoader(stream, batch_size=own, drop_last=drop_last, **options)


def share_order(loader: Any, group: _C.Communicator) -> None:
    """Give all ranks rank 0's generator, where the order of the epoch depends on it:
    they shard batches of one order only if they draw the same one. With a sampler of
    the script's own, ranks keep their generators: it draws alike on all of them, and
    they may differ, as those of TRL's GRPOTrainer, which generates by them."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, DrawnSampler):
        seed = group.broadcast_bytes(sampler.seed.to_bytes(8, "little"), 0)
        sampler.seed = int.from_bytes(seed, "little")
        return
    draws = isinstance(sampler, RandomSampler | LengthGroupedSampler)
    of_all = draws and sampler.generator is None  # type: ignore[union-attr]
    of_all |= isinstance(getattr(loader, "dataset", None), RankStream)
    if not of_all or isinstance(loader, DispatchedLoader):
        return
    state = group.broadcast_bytes(torch.get_rng_state().numpy().tobytes(), 0)
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
