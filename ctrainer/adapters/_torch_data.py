"""torch's data loaders, and tensors over NumPy's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ctrainer.adapters._torch_reading import IndexedReader, StreamReader
from ctrainer.adapters.reading import Reader
from ctrainer.runtime.notes import locate

__all__ = [
    "Epoch", "current_device", "default_collate", "loader", "reader", "tensor_over",
    "use_device",
]  # fmt: skip


def loader(dataset: Any, collate: Callable[[Any], Any] | None, **options: Any) -> Any:
    """A DataLoader that pins its batches where there is a GPU to copy them to."""
    pin = torch.cuda.is_available()
    return DataLoader(dataset, collate_fn=collate, pin_memory=pin, **options)


class Epoch:
    """Batches of one epoch of a loader from number `first` on, whose draws follow from
    their place. state: what a stream's state() was there, or None."""

    def __init__(
        self, reader: Reader, epoch: int, first: int, state: Any = None
    ) -> None:
        self.reader = reader
        self.epoch = epoch
        self.first = first
        self.state = state

    def __len__(self) -> int:
        """Batches that are left; a list of them, cut already, says so itself."""
        n = len(self.reader.loader)
        return n - self.first if self.reader.kind == "stream" else n

    def __iter__(self) -> Iterator[Any]:
        return Located(self.reader.start(self.epoch, self.first, self.state))


class Located:
    """A reader's batches; an exception gets a note with the batch and its rows."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.reader)
        except StopIteration:
            raise
        except Exception as error:
            locate(error, "epoch", (self.reader,))
            raise


def reader(loader: Any, seed: int | None, rank: int = 0, world_size: int = 1) -> Reader:
    """What reads epochs of a loader() above."""
    stream = isinstance(loader.dataset, IterableDataset)
    kind = StreamReader if stream else CutReader
    return kind(loader, seed, rank, world_size)


class CutReader(IndexedReader):
    """Of batches of indices of which those that were seen are cut off already."""

    def _seek(self, inner: Any) -> Iterator[Any]:
        return iter(inner)


def current_device() -> int | None:
    """This thread's CUDA device, or None without CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def use_device(device: int) -> None:
    """Makes a device this thread's: pinning memory then makes no context on GPU 0."""
    torch.cuda.set_device(device)


# A tensor over a NumPy array's memory.
tensor_over = torch.from_numpy
