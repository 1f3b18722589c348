"""What a source of epochs of batches offers, and one that streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctrainer.checkpoint import from_json, to_json
from ctrainer.fairseq._counting_iterators import CountingIterator

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
