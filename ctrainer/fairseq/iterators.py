"""Iterators over epochs of batches: counted, prefetched, sharded, shuffled, saved and
resumed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np

from ctrainer.checkpoint import from_json, to_json

# Iterators that know how far they are and how long.


logger = logging.getLogger(__name__)


class CountingIterator:
    """Iterates over an iterable and counts.

    `n` is the number of items consumed, those before `start` included. Items beyond
    `total` are not asked for. Raises IndexError where the iterable ends before.

    Args:
        iterable: The items; nothing of it is skipped.
        start (int | None, default None): Where n begins; None or 0: the iterable's own
            `n`, or else 0.
        total (int | None, default None): The length; None: n + len(iterable).

    Example:
        >>> from ctrainer.fairseq import CountingIterator
        >>> batches = CountingIterator([10, 20, 30])
        >>> next(batches), batches.n, batches.has_next()
        (10, 1, True)
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
        """Return whether there are items left."""
        return self.n < self.total

    def skip(self, n: int) -> Self:
        """Consume items, and return the iterator.

        Args:
            n (int): How many; StopIteration where there are fewer.
        """
        for _ in range(n):
            next(self)
        return self

    def take(self, n: int) -> Self:
        """Let it end at item n, counted from the beginning, and return it; an iterator
        below follows.

        Args:
            n (int): The new total, if it is less.
        """
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
    """Lists of consecutive items: the micro-batches of one update.

    Counts lists: ceil(len / chunk_size) of them, beginning at ceil(n / chunk_size).

    Args:
        iterable: The items, with a length.
        chunk_size (int): Items of a list, 1 or more.
        skip_remainder_batch (bool, default False): Leave a shorter last list out, floor
            instead of ceil, and cut the iterable to what is used, so that its epoch
            ends with this.

    Raises:
        ValueError: chunk_size is below 1.

    Example:
        >>> from ctrainer.fairseq import GroupedIterator
        >>> list(GroupedIterator([1, 2, 3], chunk_size=2))
        [[1, 2], [3]]
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


# An iterator whose items a thread prefetches.


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
    """Iterates over an iterable that a thread reads, up to `size` items prefetched.

    The thread starts with the first item asked for, on the CUDA device that is current
    then, and ends with the source, at `total` items, with close(), or when nobody holds
    the iterator any more. An exception in the thread is raised by the next `next()`,
    after the items before it, and by every later one. A buffer that is nearly empty
    after the first five minutes is warned of, at most every fifteen.

    Args:
        size (int): Items, 1 or more.
        iterable: Has a length.

    Raises:
        ValueError: size is below 1.

    Source: fairseq, data/iterators.py, whose thread outlives a consumer that stops
    early, and whose `next()` after the end waits for ever.

    Example:
        >>> from ctrainer.fairseq.iterators import BufferedIterator
        >>> list(BufferedIterator(2, [1, 2, 3]))
        [1, 2, 3]
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
        """End after n items at most, and return the iterator; a source with take()
        follows.

        Args:
            n (int): The new total, if it is less.
        """
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


# The base of iterators over epochs of batches, and the iterator over a stream.


MOST_BUFFERED = 20  # batches; fairseq's guard against abuse of a shared machine


class EpochBatchIterating:
    """The interface of a trainer's source of batches, epoch by epoch, counted from 1.

    seed_by_place: rows and collators draw random numbers by the seed, the epoch and the
    batch's place in it, whatever the number of workers; False on a subclass or an
    object leaves the workers as torch seeds them.

    Example:
        >>> from ctrainer.fairseq import EpochBatchIterator
        >>> from ctrainer.fairseq.iterators import EpochBatchIterating
        >>> issubclass(EpochBatchIterator, EpochBatchIterating)
        True
    """

    seed_by_place = True

    epoch: int
    num_workers: int
    _cur_epoch_itr: CountingIterator | None = None

    def _set(
        self, dataset: Any, collate_fn: Any, epoch: int, seed: int, timeout: float
    ) -> None:
        """Take over options that both iterators have."""
        self.dataset, self.collate_fn, self.timeout = dataset, collate_fn, timeout
        self.epoch, self.seed = max(epoch, 1), seed

    def _begin_epoch(self, set_dataset_epoch: bool) -> None:
        self.epoch = self.next_epoch_idx
        if set_dataset_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

    def _reader_of(self, rank: int, world_size: int, **options: Any) -> Any:
        """The reader of torch's DataLoader with those options."""
        from ctrainer.adapters import _torch_data  # torch is imported on first use

        loader = _torch_data.loader(
            self.dataset,
            self.collate_fn,
            num_workers=self.num_workers,
            timeout=self.timeout,
            **options,
        )
        seed = self.seed if self.seed_by_place else None
        return _torch_data.reader(loader, seed, rank, world_size)

    def _batches_of(self, reader: Any, first: int, state: Any = None) -> Any:
        """The batches of the epoch from number `first` on, with a length."""
        from ctrainer.adapters import _torch_data

        return _torch_data.Epoch(reader, self.epoch, first, state)

    @property
    def next_epoch_idx(self) -> int:
        """The epoch that next_epoch_itr() returns next."""
        return self.epoch + 1 if self.end_of_epoch() else self.epoch

    def end_of_epoch(self) -> bool:
        """Return whether the epoch that was begun last is used up."""
        current = self._cur_epoch_itr
        return current is not None and not current.has_next()

    @property
    def first_batch(self) -> Any:
        """A batch to stand in for missing ones; "DUMMY": the first that is seen."""
        return "DUMMY"


class StreamingEpochBatchIterator(EpochBatchIterating):
    """Batches of samples of a torch IterableDataset with a length.

    Its order is its own. Within an epoch it resumes by the data set's state_dict(), if
    it has that and load_state_dict(), else by reading past what was seen.

    Args:
        dataset: The data set.
        max_sentences (int, default 1): Samples of a batch.
        collate_fn (Callable[[Any], Any] | None, default None): Makes a batch of a list
            of samples; None: torch's.
        epoch (int, default 1): Where to begin, from 1.
        num_workers (int, default 0): Processes that read; 0: this one.
        buffer_size (int, default 0): Batches that the workers, if any, hold ready, at
            most 20.
        timeout (float, default 0): Seconds to wait for a batch of a worker; 0: for
            ever.
        persistent_workers (bool, default True): Keep the processes between epochs.
        seed (int, default 1): Of the draws.

    Raises:
        TypeError: the data set is not iterable.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.iterators import StreamingEpochBatchIterator
        >>> class Stream(torch.utils.data.IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(4))
        ...     def __len__(self):
        ...         return 4
        >>> epochs = StreamingEpochBatchIterator(Stream(), max_sentences=2)
        >>> [batch.tolist() for batch in epochs.next_epoch_itr()]
        [[0, 1], [2, 3]]
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
        self._set(dataset, collate_fn, epoch, seed, timeout)
        self.num_workers = num_workers
        self.buffer_size = min(buffer_size, MOST_BUFFERED)
        self.max_sentences = max_sentences
        self.persistent_workers = persistent_workers and num_workers > 0
        self._reader: Any = None
        self._loaded: dict[str, Any] = {}  # a state, until its epoch begins

    def next_epoch_itr(
        self,
        shuffle: bool = True,
        fix_batches_to_gpus: bool = False,
        set_dataset_epoch: bool = True,
    ) -> CountingIterator:
        """Begin the next epoch, or continue the one that was loaded, and return its
        batches.

        Args:
            shuffle, fix_batches_to_gpus (bool): Not read: the order is
                the data set's.
            set_dataset_epoch (bool, default True): Call the data set's set_epoch(), if
                it has one.
        """
        self._begin_epoch(set_dataset_epoch)
        if self._reader is None:
            self._reader = self._stream_reader()
        loaded, self._loaded = self._loaded, {}
        n, stream = loaded.get("iterations_in_epoch", 0), loaded.get("stream")
        state = None if stream is None else from_json(stream)
        batches = self._batches_of(self._reader, n, state)
        self._cur_epoch_itr = CountingIterator(batches, start=n)
        return self._cur_epoch_itr

    def _stream_reader(self) -> Any:
        options: dict[str, Any] = {}
        if self.num_workers > 0:
            options["prefetch_factor"] = max(
                -(-self.buffer_size // self.num_workers), 2
            )
        return self._reader_of(
            0,
            1,
            batch_size=self.max_sentences,
            worker_init_fn=getattr(self.dataset, "worker_init_fn", None),
            persistent_workers=self.persistent_workers,
            **options,
        )

    @property
    def iterations_in_epoch(self) -> int:
        """Batches of the epoch that were taken."""
        current = self._cur_epoch_itr
        n = self._loaded.get("iterations_in_epoch", 0) if current is None else current.n
        return int(n)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, as fairseq's, and within one the place in it; at the end of
        an epoch the next, which fairseq's begins anew."""
        n = self.iterations_in_epoch
        if self.end_of_epoch():
            return {"epoch": self.epoch + 1}
        if n == 0:
            return {"epoch": self.epoch}
        if self._cur_epoch_itr is None:
            return {"epoch": self.epoch, **self._loaded}
        stream = to_json(self._reader.state())
        return {"epoch": self.epoch, "iterations_in_epoch": n, "stream": stream}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let next_epoch_itr() continue where state_dict() was called.

        Args:
            state_dict (dict[str, Any]): What state_dict() returned.
        """
        self.epoch = state_dict["epoch"]
        self._loaded = {k: v for k, v in state_dict.items() if k != "epoch"}
        self._cur_epoch_itr = None


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


class EpochBatchIterator(EpochBatchIterating):
    """Epochs of the batches that `batch_sampler` lists, for one rank of num_shards.

    Shuffled batches are permuted by NumPy's RandomState(seed + epoch), on all ranks
    alike, and then distributed; where they do not divide evenly, a rank gets an empty
    batch last. A data set with `supports_prefetch` gets the indices before they
    are read; with fix_batches_to_gpus its batches are distributed first, and then
    permuted with seed + epoch + shard_id.

    Args:
        dataset: What a torch DataLoader takes, with `__getitem__`.
        collate_fn (Callable[[Any], Any] | None): Makes a batch of a list of samples;
            None: torch's.
        batch_sampler: An iterable of batches of indices, or a function that makes one.
        seed (int, default 1): Of the order and the draws.
        num_shards (int, default 1): Ranks.
        shard_id (int, default 0): This rank, from 0.
        num_workers (int, default 0): Processes that read; 0: this one.
        epoch (int, default 1): Where to begin, from 1.
        buffer_size (int, default 0): Batches that a thread holds ready, at most 20; 0
            is no thread, nor is there one without workers where draws go by place.
        timeout (float, default 0): Seconds to wait for a batch of a worker; 0: for
            ever.
        disable_shuffling (bool, default False): Never change the order.
        skip_remainder_batch (bool, default False): An epoch is one batch shorter,
            whether its last is full or not.
        grouped_shuffling (bool, default False): Permute groups of num_shards
            neighbours, so that the ranks' batches of a step stay alike in length;
            batches that do not fill a group are left out of that epoch.

    Raises:
        TypeError: the data set has no `__getitem__`.
        ValueError: shard_id is not below num_shards.

    Source: fairseq, data/iterators.py, but where an epoch would not be resumed exactly:
    docs/reference/fairseq_data.md lists these places.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq import EpochBatchIterator
        >>> rows = torch.arange(4)
        >>> epochs = EpochBatchIterator(rows, torch.stack, [[0, 1], [2, 3]])
        >>> [batch.tolist() for batch in epochs.next_epoch_itr(shuffle=False)]
        [[0, 1], [2, 3]]
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
    ) -> None:
        if not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset is a {type(dataset).__name__} without __getitem__; a stream "
                "is for StreamingEpochBatchIterator"
            )
        if not 0 <= shard_id < num_shards:
            raise ValueError(
                "shard_id must be between 0 and num_shards, got "
                f"{shard_id} of {num_shards}"
            )
        self._set(dataset, collate_fn, epoch, seed, timeout)
        self.num_workers = num_workers
        self.buffer_size = min(buffer_size, MOST_BUFFERED)
        self.frozen_batches = tuple(batch_sampler)  # of all workers, not shuffled
        self.num_shards = num_shards
        self.shard_id = shard_id
        self.disable_shuffling = disable_shuffling
        self.skip_remainder_batch = skip_remainder_batch
        self.grouped_shuffling = grouped_shuffling
        self.shuffle = not disable_shuffling
        self._next_epoch_itr: CountingIterator | None = None  # one that was loaded
        self._supports_prefetch = bool(getattr(dataset, "supports_prefetch", False))

    def __len__(self) -> int:
        return -(-len(self.frozen_batches) // self.num_shards)

    @property
    def first_batch(self) -> Any:
        """The first batch before shuffling, collated; "DUMMY" where the data set has
        supports_fetch_outside_dataloader False. Raises Exception if there is none."""
        if not self.frozen_batches:
            raise Exception(_EMPTY)
        if not getattr(self.dataset, "supports_fetch_outside_dataloader", True):
            return "DUMMY"
        samples = [self.dataset[i] for i in self.frozen_batches[0]]
        return samples if self.collate_fn is None else self.collate_fn(samples)

    # ---- position ------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Batches of the epoch that were taken."""
        return self.iterations_in_epoch

    @property
    def iterations_in_epoch(self) -> int:
        """Batches of the epoch that were taken."""
        for itr in (self._cur_epoch_itr, self._next_epoch_itr):
            if itr is not None:
                return itr.n
        return 0

    def next_epoch_itr(
        self,
        shuffle: bool = True,
        fix_batches_to_gpus: bool = False,
        set_dataset_epoch: bool = True,
    ) -> CountingIterator:
        """Begin the next epoch, or continue the one that was loaded, and return its
        batches.

        Args:
            shuffle (bool, default True): Change the order of the batches.
            fix_batches_to_gpus (bool, default False): Give each rank the same batches
                in every epoch, for data sets that prefetch.
            set_dataset_epoch (bool, default True): Call the data set's set_epoch(), if
                it has one.

        Raises:
            RuntimeError: the epoch has no batches at the loaded place.
        """
        self._begin_epoch(set_dataset_epoch)
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

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's version 2: epoch, iterations_in_epoch and shuffle. At the
        end of an epoch it is the beginning of the next."""
        ended = self.end_of_epoch()
        return {
            "version": 2,
            "epoch": self.epoch + 1 if ended else self.epoch,
            "iterations_in_epoch": 0 if ended else self.iterations_in_epoch,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let next_epoch_itr() continue where state_dict() was called.

        Args:
            state_dict (dict[str, Any]): The state; one without a version, fairseq's
                first, means the next epoch where this one has no batches at that place.

        Raises:
            RuntimeError: the epoch has no batches at that place.
        """
        self._cur_epoch_itr = self._next_epoch_itr = None
        self.epoch = state_dict["epoch"]
        self.shuffle = state_dict.get("shuffle", True)
        offset = state_dict.get("iterations_in_epoch", 0)
        if offset > 0:
            self._next_epoch_itr = self._get_iterator_for_epoch(
                self.epoch, self.shuffle, offset=offset
            )
            if self._next_epoch_itr is None:
                if state_dict.get("version", 1) != 1:
                    raise RuntimeError(_MISMATCH)
                self.epoch += 1

    # ---- one epoch -----------------------------------------------------------------

    def _get_iterator_for_epoch(
        self,
        epoch: int,
        shuffle: bool,
        fix_batches_to_gpus: bool = False,
        offset: int = 0,
    ) -> CountingIterator | None:
        """The epoch from batch `offset` on; None where there is none at that place."""
        order = self.ordered_batches(epoch, fix_batches_to_gpus, shuffle)
        reader = self._reader_of(
            self.shard_id,
            self.num_shards,
            batch_sampler=order[offset:],
            persistent_workers=self.num_workers > 0,
        )
        batches = self._batches_of(reader, offset)
        if offset > 0 and len(batches) == 0:
            return None
        # Without workers a thread would draw from the generators that training uses.
        if self.buffer_size > 0 and not (self.seed_by_place and self.num_workers == 0):
            batches = BufferedIterator(self.buffer_size, batches)
        itr = CountingIterator(batches, start=offset)
        if self.skip_remainder_batch:
            itr.take(max(len(itr) - 1, 0))
            logger.info("skip final residual batch, total_num_itrs = %d", len(itr))
        return itr

    def ordered_batches(
        self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool
    ) -> list[Any]:
        """Return this rank's batches of indices in the order of an epoch.

        Args:
            epoch (int): From 1.
            fix_batches_to_gpus (bool): Give each rank the same batches in every epoch.
            shuffle (bool): Change the order.
        """
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
        """The batches of this worker, also for the data set's prefetch()."""
        own = batches[self.shard_id :: self.num_shards]
        if len(own) * self.num_shards < len(batches):
            own.append([])
        if self._supports_prefetch:
            self.dataset.prefetch(list(chain.from_iterable(own)))
        return own


# The iterators over batches of fairseq's data/iterators.py, by its names.


__all__ = [
    "BufferedIterator",
    "CountingIterator",
    "EpochBatchIterating",
    "EpochBatchIterator",
    "GroupedIterator",
    "StreamingEpochBatchIterator",
]
