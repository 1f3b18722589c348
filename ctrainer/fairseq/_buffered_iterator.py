"""An iterator whose items a thread fetches ahead."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Self

logger = logging.getLogger(__name__)

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
