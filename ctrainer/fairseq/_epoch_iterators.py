"""Iterators over epochs of batches: sharded, shuffled, saved and resumed."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ctrainer.fairseq._buffered_iterator import BufferedIterator
from ctrainer.fairseq._counting_iterators import CountingIterator, check_shard
from ctrainer.fairseq._epoch_iterating import (
    MOST_BUFFERED,
    EpochBatchIterating,
    epoch_of,
    load,
    reader_of,
)

logger = logging.getLogger(__name__)

_EMPTY = (
    "The dataset is empty. This could indicate that all elements in the dataset have "
    "been skipped. Try increasing the max number of allowed tokens or using a larger "
    "dataset."
)
_MISMATCH = (
    "Cannot resume training due to dataloader mismatch, please report this to the "
    "fairseq developers. You can relaunch training with `--reset-dataloader` and it "
    "should work."
)


class FrozenBatchSampler:
    """The batches of one epoch, as a DataLoader's batch_sampler that can be
    refilled."""

    def __init__(
        self,
        ordered_batches: Callable[[int, bool, bool], Sequence[Any]],
        epoch: int,
        fix_batches_to_gpus: bool,
        shuffle: bool,
        initial_offset: int,
    ) -> None:
        self.ordered_batches = ordered_batches
        self.fix_batches_to_gpus = fix_batches_to_gpus
        self.shuffle = shuffle
        self.make_batches_for_epoch(epoch, initial_offset)

    def make_batches_for_epoch(self, epoch: int, offset: int = 0) -> None:
        """Orders the epoch's batches and leaves the first `offset` out."""
        batches = self.ordered_batches(epoch, self.fix_batches_to_gpus, self.shuffle)
        self.batches = batches[offset:]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class EpochBatchIterator(EpochBatchIterating):
    """Epochs of the batches that `batch_sampler` lists, for one worker of num_shards.

    dataset: what a torch DataLoader takes, with `__getitem__`. collate_fn: makes a
    batch of a list of samples. batch_sampler: an iterable of batches of indices, or a
    function (dataset, epoch) that is called for each epoch's.

    Shuffled batches are permuted by NumPy's RandomState(seed + epoch), on all workers
    alike, and then dealt out; where they do not divide evenly, a worker gets an empty
    batch last. A data set with `supports_prefetch` is told first what it will be asked
    for; with fix_batches_to_gpus its batches are dealt out first, and then permuted
    with seed + epoch + shard_id. grouped_shuffling permutes groups of num_shards
    neighbours, so that the workers' batches of a step stay alike in length; batches
    that do not fill a group are left out of that epoch.

    buffer_size: how many batches, at most 20, a thread holds ready; 0 is no thread, nor
    is there one without workers where draws go by place.
    skip_remainder_batch: an epoch is one batch shorter, whether its last is full or
    not. reuse_dataloader: one DataLoader for all epochs.

    Source: fairseq, data/iterators.py. It parts from it where an epoch would not be
    resumed exactly: docs/fairseq.md lists these places.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        batch_sampler: Any,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        buffer_size: int = 0,
        timeout: float = 0,
        disable_shuffling: bool = False,
        skip_remainder_batch: bool = False,
        grouped_shuffling: bool = False,
        reuse_dataloader: bool = False,
        persistent_workers: bool = True,
    ) -> None:
        check_dataset(dataset)
        check_shard(num_shards, shard_id)
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batch_sampler = batch_sampler
        self.seed = seed
        self.num_shards = num_shards
        self.shard_id = shard_id
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers and num_workers > 0
        self.buffer_size = min(buffer_size, MOST_BUFFERED)
        self.timeout = timeout
        self.disable_shuffling = disable_shuffling
        self.skip_remainder_batch = skip_remainder_batch
        self.grouped_shuffling = grouped_shuffling
        self.reuse_dataloader = reuse_dataloader

        self.epoch = max(epoch, 1)
        self.shuffle = not disable_shuffling
        self.dataloader: Any = None  # the one that is used again
        self.epoch_batch_sampler: FrozenBatchSampler
        self._buffered: BufferedIterator | None = None  # the last one over it
        self._frozen_batches = None if callable(batch_sampler) else tuple(batch_sampler)
        self._cur_epoch_itr: CountingIterator | None = None
        self._next_epoch_itr: CountingIterator | None = None  # one that was loaded
        self._supports_prefetch = bool(getattr(dataset, "supports_prefetch", False))

    # ---- the batches before they are ordered ---------------------------------------

    @property
    def frozen_batches(self) -> tuple[Any, ...]:
        """The batches of indices of all workers, before shuffling."""
        if self._frozen_batches is None:
            self._frozen_batches = tuple(self.batch_sampler(self.dataset, self.epoch))
        return self._frozen_batches

    def __len__(self) -> int:
        return -(-len(self.frozen_batches) // self.num_shards)

    @property
    def first_batch(self) -> Any:
        """The first batch before shuffling, collated; "DUMMY" where the data set has
        supports_fetch_outside_dataloader False. Raises Exception if there is none."""
        indices = self._first_indices()
        if indices is None:
            raise Exception(_EMPTY)
        if not getattr(self.dataset, "supports_fetch_outside_dataloader", True):
            return "DUMMY"
        samples = [self.dataset[i] for i in indices]
        return samples if self.collate_fn is None else self.collate_fn(samples)

    def _first_indices(self) -> Sequence[int] | None:
        return next(iter(self.frozen_batches), None)

    # ---- position ------------------------------------------------------------------

    @property
    def n(self) -> int:
        return self.iterations_in_epoch

    @property
    def iterations_in_epoch(self) -> int:
        for itr in (self._cur_epoch_itr, self._next_epoch_itr):
            if itr is not None:
                return itr.n
        return 0

    @property
    def next_epoch_idx(self) -> int:
        return self.epoch + 1 if self.end_of_epoch() else self.epoch

    def end_of_epoch(self) -> bool:
        current = self._cur_epoch_itr
        return current is not None and not current.has_next()

    def next_epoch_itr(
        self,
        shuffle: bool = True,
        fix_batches_to_gpus: bool = False,
        set_dataset_epoch: bool = True,
    ) -> CountingIterator:
        self._turn_to(self.next_epoch_idx)
        if set_dataset_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        itr, self._next_epoch_itr = self._next_epoch_itr, None
        offset = 0
        if itr is None:
            self.shuffle = shuffle and not self.disable_shuffling
        elif fix_batches_to_gpus and self._supports_prefetch:
            offset, itr = itr.n, None  # ordered before it was known that they are fixed
        if itr is None:
            itr = self._get_iterator_for_epoch(
                self.epoch, self.shuffle, fix_batches_to_gpus, offset
            )
        if itr is None:
            raise RuntimeError(_MISMATCH)
        self._cur_epoch_itr = itr
        return itr

    def _turn_to(self, epoch: int) -> None:
        if callable(self.batch_sampler) and epoch != self.epoch:
            self._frozen_batches = None
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """fairseq's version 2: epoch, iterations_in_epoch and shuffle. At the end of an
        epoch it is the beginning of the next."""
        ended = self.end_of_epoch()
        return {
            "version": 2,
            "epoch": self.epoch + 1 if ended else self.epoch,
            "iterations_in_epoch": 0 if ended else self.iterations_in_epoch,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes next_epoch_itr() go on where state_dict() was called.

        Raises RuntimeError where the epoch has no batches at that place; a state
        without a version, fairseq's first, then means the next epoch.
        """
        self._cur_epoch_itr = self._next_epoch_itr = None
        self._turn_to(state_dict["epoch"])
        self.shuffle = state_dict.get("shuffle", True)
        offset = state_dict.get("iterations_in_epoch", 0)
        if offset > 0:
            self._next_epoch_itr = self._get_iterator_for_epoch(
                self.epoch, self.shuffle, offset=offset
            )
            if self._next_epoch_itr is None:
                if state_dict.get("version", 1) != 1:
                    raise RuntimeError(_MISMATCH)
                self._turn_to(self.epoch + 1)

    # ---- one epoch -----------------------------------------------------------------

    def _get_iterator_for_epoch(
        self,
        epoch: int,
        shuffle: bool,
        fix_batches_to_gpus: bool = False,
        offset: int = 0,
    ) -> CountingIterator | None:
        """The epoch from batch `offset` on; None where there is none at that place."""
        batches = self._loader(epoch, shuffle, fix_batches_to_gpus, offset)
        if offset > 0 and len(batches) == 0:
            return None
        # Without workers a thread would draw from the generators that training uses.
        if self.buffer_size > 0 and not (self.seed_by_place and self.num_workers == 0):
            batches = self._buffered = BufferedIterator(self.buffer_size, batches)
        itr = CountingIterator(batches, start=offset)
        if self.skip_remainder_batch:
            itr.take(max(len(itr) - 1, 0))
            logger.info("skip final residual batch, total_num_itrs = %d", len(itr))
        return itr

    def _loader(self, epoch: int, shuffle: bool, fixed: bool, offset: int) -> Any:
        if self.dataloader is not None:
            if self._buffered is not None:
                self._buffered.close()  # two threads must not read from one loader
            self.epoch_batch_sampler.fix_batches_to_gpus = fixed
            self.epoch_batch_sampler.shuffle = shuffle
            self.epoch_batch_sampler.make_batches_for_epoch(epoch, offset)
            return epoch_of(self.dataloader, epoch, offset)
        # The loader's batches do not own this object, which owns the loader: a cycle
        # would leave workers to the garbage collector (_torch_reading._Indices).
        ordered = functools.partial(type(self).ordered_batches, weakref.proxy(self))
        self.epoch_batch_sampler = FrozenBatchSampler(
            ordered, epoch, fixed, shuffle, initial_offset=offset
        )
        loader = load(
            self.dataset,
            self.collate_fn,
            batch_sampler=self.epoch_batch_sampler,
            num_workers=self.num_workers,
            timeout=self.timeout,
            persistent_workers=self.persistent_workers,
        )
        seed = self.seed if self.seed_by_place else None
        reader = reader_of(loader, seed, self.shard_id, self.num_shards)
        if self.reuse_dataloader:
            self.dataloader = reader
        return epoch_of(reader, epoch, offset)

    def ordered_batches(
        self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool
    ) -> list[Any]:
        """This worker's batches of indices in the order of an epoch."""
        seed = self.seed + epoch
        fixed = fix_batches_to_gpus and self._supports_prefetch
        batches = list(self.frozen_batches)
        if shuffle and not fixed:
            batches = self._shuffled(batches, seed)
        batches = self._own(batches)
        if shuffle and fixed:
            batches = self._shuffled(batches, seed + self.shard_id)
        return batches

    def _shuffled(self, batches: list[Any], seed: int) -> list[Any]:
        random = np.random.RandomState(seed)
        if not self.grouped_shuffling:
            random.shuffle(batches)
            return batches
        size = self.num_shards
        whole = len(batches) // size * size
        groups = [batches[i : i + size] for i in range(0, whole, size)]
        random.shuffle(groups)
        return list(chain.from_iterable(groups))

    def _own(self, batches: list[Any]) -> list[Any]:
        """This worker's share, which the data set is told of if it wants to know."""
        own = batches[self.shard_id :: self.num_shards]
        if len(own) * self.num_shards < len(batches):
            own.append([])
        if self._supports_prefetch:
            self.dataset.prefetch(list(chain.from_iterable(own)))
        return own


class GroupedEpochBatchIterator(EpochBatchIterator):
    """Epochs of batches from several data sets, one data set at a time.

    batch_samplers: for each data set its batches of indices into `dataset`. mult_rate *
    num_shards neighbouring batches stay together and come from one data set, so that
    all workers, and with mult_rate micro-batches all of an update, work on the same
    one; what does not fill such a step is left out. Each data set's batches are
    permuted with seed + epoch, and then the steps. skip_remainder_batch changes
    nothing: every step is whole. `len()` counts the batches of this worker (fairseq's
    counts all workers').
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        batch_samplers: Iterable[Iterable[Any]],
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 0,
        mult_rate: int = 1,
        buffer_size: int = 0,
        skip_remainder_batch: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            collate_fn,
            tuple(tuple(batches) for batches in batch_samplers),
            seed=seed,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=buffer_size,
        )
        self.step_size = mult_rate * num_shards
        self.lengths = [
            len(batches) // self.step_size * self.step_size
            for batches in self.frozen_batches
        ]

    def __len__(self) -> int:
        return sum(self.lengths) // self.num_shards

    def _first_indices(self) -> Sequence[int] | None:
        return next(chain.from_iterable(self.frozen_batches), None)

    def ordered_batches(
        self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool
    ) -> list[Any]:
        seed = self.seed + epoch
        sets = [list(batches) for batches in self.frozen_batches]
        if shuffle:
            sets = [self._shuffled(batches, seed) for batches in sets]
        whole = zip(sets, self.lengths, strict=True)
        batches = list(chain.from_iterable(one[:n] for one, n in whole))
        if shuffle:
            size = self.step_size
            steps = np.random.RandomState(seed).permutation(len(batches) // size)
            runs = (batches[i * size : (i + 1) * size] for i in steps)
            batches = list(chain.from_iterable(runs))
        return self._own(batches)


def check_dataset(dataset: Any) -> None:
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"dataset is a {type(dataset).__name__} without __getitem__; a stream is "
            "for StreamingEpochBatchIterator"
        )
