"""What a source of epochs of batches offers, and one that streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctrainer.fairseq._buffered_iterator import BufferedIterator
from ctrainer.fairseq._counting_iterators import CountingIterator

MOST_BUFFERED = 20  # batches; fairseq's guard against abuse of a shared machine


def load(dataset: Any, collate: Callable[[Any], Any] | None, **options: Any) -> Any:
    """torch's DataLoader, which is imported now that it is needed."""
    from ctrainer.adapters import _torch_data

    return _torch_data.loader(dataset, collate, **options)


class EpochBatchIterating:
    """What a trainer asks of its source of batches, epoch by epoch, counted from 1."""

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

    Its order is its own: the state is the epoch alone, and a resumed epoch begins anew.
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
        batches = load(
            self.dataset,
            self.collate_fn,
            batch_size=self.max_sentences,
            num_workers=self.num_workers,
            timeout=self.timeout,
            worker_init_fn=getattr(self.dataset, "worker_init_fn", None),
            persistent_workers=self.persistent_workers,
        )
        if self.buffer_size > 0:
            batches = BufferedIterator(self.buffer_size, batches)
        self._current_epoch_iterator = CountingIterator(batches)
        return self._current_epoch_iterator

    def end_of_epoch(self) -> bool:
        current = self._current_epoch_iterator
        return current is not None and not current.has_next()

    @property
    def iterations_in_epoch(self) -> int:
        current = self._current_epoch_iterator
        return 0 if current is None else current.n

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self._current_epoch_iterator = None
