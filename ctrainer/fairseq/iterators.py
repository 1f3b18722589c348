"""Iterators over epochs of batches: counted, prefetched, sharded, shuffled, saved and
resumed.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np

from ctrainer.checkpoint import from_json, to_json

# Iterators that know how far they are and how long.


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


# An iterator whose items a thread fetches ahead.


_LOOK_SECONDS = 1.0  # between two looks whether there is a thread to wait for
_QUIET_SECONDS = 5 * 60  # at the start, while workers get going
_BETWEEN_WARNINGS_SECONDS = 15 * 60


class _End:
    """What follows the last item: the error that ended the source, or None."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Channel:
    """What the thread and its consumer share; neither of them holds the other.

    SimpleQueue alone, which is C and may be called from a finalizer: `room` has as many
    entries as items may still be put.
    """

    def __init__(self, size: int) -> None:
        self.items: SimpleQueue[Any] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()
        self.closed = False
        for _ in range(size):
            self.room.put(None)

    def close(self) -> None:
        self.closed = True
        self.room.put(None)  # wakes a thread that waits for room

    def fill(self, source: Iterable[Any], n: int, prepare: Callable[[], None]) -> None:
        """The thread's whole life: puts the first n items, then the end. Its error,
        whatever it is, goes to the consumer."""
        error = None
        try:
            prepare()
            for item in islice(source, n):
                self.room.get()
                if self.closed:
                    return
                self.items.put(item)
        except BaseException as e:
            error = e
        self.items.put(_End(error))


class BufferedIterator:
    """Iterates over an iterable that a thread reads, up to `size` items ahead.

    The thread starts with the first item asked for, on the CUDA device that is current
    then, and ends with the source, at `total` items, with close(), or when nobody holds
    the iterator any more. An exception in the thread is raised by the next `next()`,
    after the items before it, and by every later one.

    A buffer that is nearly empty after the first five minutes is warned of, at most
    every fifteen. Source: fairseq, data/iterators.py, whose thread outlives a consumer
    that stops early, and whose `next()` after the end waits for ever.
    """

    def __init__(self, size: int, iterable: Any) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.total: int = len(iterable)
        self._size = size
        self._iterable = iterable
        self._channel = _Channel(size)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # whose thread it is
        self._given = 0
        self._warn_after = time.monotonic() + _QUIET_SECONDS
        self._finish = weakref.finalize(self, self._channel.close)

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._given >= self.total or self._channel.closed:
            raise StopIteration
        if self._thread is None:
            self._start()
        self._warn_of_waiting()
        item = self._next_item()
        if type(item) is _End:
            self._channel.items.put(item)  # for whoever asks again
            if item.error is not None:
                raise item.error
            raise StopIteration
        self._channel.room.put(None)
        self._given += 1
        return item

    def _next_item(self) -> Any:
        items = self._channel.items
        while True:
            try:
                return items.get(timeout=_LOOK_SECONDS)
            except Empty:
                if os.getpid() != self._process:
                    raise RuntimeError(
                        f"this BufferedIterator is read by a thread of process "
                        f"{self._process}; process {os.getpid()}, which was forked "
                        "from it, has to make its own"
                    ) from None

    def take(self, n: int) -> Self:
        """Ends after n items at most, and tells the source so if it has take()."""
        self.total = min(self.total, n)
        if hasattr(self._iterable, "take"):
            self._iterable.take(n)
        return self

    def close(self) -> None:
        """Ends the thread and waits for it; there are no further items."""
        self._finish()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._channel.fill,
            args=(self._iterable, self.total, _device_setter()),
            name="ctrainer-batches",
            daemon=True,
        )
        self._process = os.getpid()
        self._thread.start()

    def _warn_of_waiting(self) -> None:
        if self._channel.items.qsize() >= min(2, max(1, self._size // 2)):
            return
        if time.monotonic() > self._warn_after:
            self._warn_after = time.monotonic() + _BETWEEN_WARNINGS_SECONDS
            logger.warning(
                "Data loading buffer is empty or nearly empty. This may indicate a "
                "data loading bottleneck, and increasing the number of workers "
                "(--num-workers) may help."
            )


def _device_setter() -> Callable[[], None]:
    """Makes another thread use this thread's CUDA device; nothing without torch."""
    try:
        from ctrainer.adapters import _torch_data
    except ImportError:
        return lambda: None
    device = _torch_data.current_device()
    return lambda: None if device is None else _torch_data.use_device(device)


# What a source of epochs of batches offers, and one that streams.


MOST_BUFFERED = 20  # batches; fairseq's guard against abuse of a shared machine


def load(dataset: Any, collate: Callable[[Any], Any] | None, **options: Any) -> Any:
    """torch's DataLoader, which is imported now that it is needed."""
    from ctrainer.adapters import _torch_data

    return _torch_data.loader(dataset, collate, **options)


def epoch_of(reader: Any, epoch: int, first: int, state: Any = None) -> Any:
    """The batches of an epoch from number `first` on, with a length."""
    from ctrainer.adapters import _torch_data

    return _torch_data.Epoch(reader, epoch, first, state)


def reader_of(loader: Any, seed: int | None, rank: int, world_size: int) -> Any:
    from ctrainer.adapters import _torch_data

    return _torch_data.reader(loader, seed, rank, world_size)


class EpochBatchIterating:
    """What a trainer asks of its source of batches, epoch by epoch, counted from 1.

    seed_by_place: rows and collators draw random numbers by the seed, the epoch and the
    batch's place in it, whatever the number of workers; False on a subclass or an
    object leaves the workers as torch seeds them.
    """

    seed_by_place = True

    def __len__(self) -> int:
        """Batches of an epoch, for this worker."""
        raise NotImplementedError

    @property
    def next_epoch_idx(self) -> int:
        """The epoch that next_epoch_itr() would give."""
        raise NotImplementedError

    def next_epoch_itr(
        self,
        shuffle: bool = True,
        fix_batches_to_gpus: bool = False,
        set_dataset_epoch: bool = True,
    ) -> CountingIterator:
        """Begins the next epoch, or goes on with the one that was loaded.

        shuffle: change the order of the batches. fix_batches_to_gpus: give each worker
        the same batches in every epoch, for data sets that prefetch. set_dataset_epoch:
        tell the data set's set_epoch(), if it has one.
        """
        raise NotImplementedError

    def end_of_epoch(self) -> bool:
        """Whether the epoch that was begun last is used up."""
        raise NotImplementedError

    @property
    def iterations_in_epoch(self) -> int:
        """Batches consumed of the current epoch."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def first_batch(self) -> Any:
        """A batch to stand in for missing ones; "DUMMY": the first that is seen."""
        return "DUMMY"


class StreamingEpochBatchIterator(EpochBatchIterating):
    """Batches of `max_sentences` samples of a torch IterableDataset with a length.

    Its order is its own. Within an epoch it goes on by the data set's state_dict(), if
    it has that and load_state_dict(), else by reading past what was seen. seed: of the
    draws. buffer_size: at most 20, batches that the workers, if any, hold ready.
    """

    def __init__(
        self,
        dataset: Any,
        max_sentences: int = 1,
        collate_fn: Callable[[Any], Any] | None = None,
        epoch: int = 1,
        num_workers: int = 0,
        buffer_size: int = 0,
        timeout: float = 0,
        persistent_workers: bool = True,
        seed: int = 1,
    ) -> None:
        if not hasattr(dataset, "__iter__"):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}, which is not iterable; one "
                "with indices is for EpochBatchIterator"
            )
        self.dataset = dataset
        self.max_sentences = max_sentences
        self.collate_fn = collate_fn
        self.epoch = max(epoch, 1)
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers and num_workers > 0
        self.buffer_size = min(buffer_size, MOST_BUFFERED)
        self.timeout = timeout
        self.seed = seed
        self._reader: Any = None
        self._loaded: dict[str, Any] = {}  # a state, until its epoch begins
        self._current_epoch_iterator: CountingIterator | None = None

    @property
    def next_epoch_idx(self) -> int:
        return self.epoch + 1 if self.end_of_epoch() else self.epoch

    def next_epoch_itr(
        self,
        shuffle: bool = True,
        fix_batches_to_gpus: bool = False,
        set_dataset_epoch: bool = True,
    ) -> CountingIterator:
        self.epoch = self.next_epoch_idx
        if set_dataset_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        if self._reader is None:
            seed = self.seed if self.seed_by_place else None
            self._reader = reader_of(self._make_loader(), seed, 0, 1)
        loaded, self._loaded = self._loaded, {}
        n, stream = loaded.get("iterations_in_epoch", 0), loaded.get("stream")
        batches = epoch_of(
            self._reader, self.epoch, n, None if stream is None else from_json(stream)
        )
        self._current_epoch_iterator = CountingIterator(batches, start=n)
        return self._current_epoch_iterator

    def _make_loader(self) -> Any:
        options: dict[str, Any] = {}
        if self.num_workers > 0:
            options["prefetch_factor"] = max(
                -(-self.buffer_size // self.num_workers), 2
            )
        return load(
            self.dataset,
            self.collate_fn,
            batch_size=self.max_sentences,
            num_workers=self.num_workers,
            timeout=self.timeout,
            worker_init_fn=getattr(self.dataset, "worker_init_fn", None),
            persistent_workers=self.persistent_workers,
            **options,
        )

    def end_of_epoch(self) -> bool:
        current = self._current_epoch_iterator
        return current is not None and not current.has_next()

    @property
    def iterations_in_epoch(self) -> int:
        current = self._current_epoch_iterator
        n = self._loaded.get("iterations_in_epoch", 0) if current is None else current.n
        return int(n)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, as fairseq's, and within one the place in it; at the end of an
        epoch the next, which fairseq's begins anew."""
        n = self.iterations_in_epoch
        if self.end_of_epoch():
            return {"epoch": self.epoch + 1}
        if n == 0:
            return {"epoch": self.epoch}
        if self._current_epoch_iterator is None:
            return {"epoch": self.epoch, **self._loaded}
        stream = to_json(self._reader.state())
        return {"epoch": self.epoch, "iterations_in_epoch": n, "stream": stream}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self._loaded = {k: v for k, v in state_dict.items() if k != "epoch"}
        self._current_epoch_iterator = None


# Iterators over epochs of batches: sharded, shuffled, saved and resumed.


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


# The iterators over batches of fairseq's data/iterators.py, by its names.


__all__ = [
    "BufferedIterator",
    "CountingIterator",
    "EpochBatchIterating",
    "EpochBatchIterator",
    "FrozenBatchSampler",
    "GroupedEpochBatchIterator",
    "GroupedIterator",
    "ShardedIterator",
    "StreamingEpochBatchIterator",
]
