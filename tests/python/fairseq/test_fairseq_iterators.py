"""fairseq's iterators that count, group, shard and buffer."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ctrainer.fairseq import iterators
from ctrainer.fairseq.iterators import (
    BufferedIterator,
    CountingIterator,
    GroupedIterator,
)


def test_a_counting_iterator_counts() -> None:
    itr = CountingIterator(range(10))
    assert (itr.n, len(itr), itr.has_next()) == (0, 10, True)
    assert [next(itr), next(itr)] == [0, 1]
    assert itr.skip(3) is itr
    assert (itr.n, next(itr)) == (5, 5)
    assert list(itr) == [6, 7, 8, 9]
    assert (itr.n, itr.has_next()) == (10, False)
    with pytest.raises(StopIteration):
        next(itr)


def test_counting_begins_at_start_or_where_the_iterable_is() -> None:
    itr = CountingIterator(range(4, 10), start=4)
    assert (itr.n, len(itr), list(itr)) == (4, 10, [4, 5, 6, 7, 8, 9])
    below = CountingIterator(range(10), total=10).skip(3)
    assert (CountingIterator(below, total=10).n, next(below)) == (3, 3)


def test_items_beyond_the_total_are_not_asked_for() -> None:
    source = iter(range(10))
    assert list(CountingIterator(source, total=8)) == list(range(8))
    assert next(source) == 8


def test_a_source_that_ends_early_is_an_error() -> None:
    itr = CountingIterator(range(10), total=12)
    text = "^Iterator expected to have length 12, but exhausted at position 10.$"
    with pytest.raises(IndexError, match=text):
        list(itr)


def test_skipping_beyond_the_end_stops() -> None:
    itr = CountingIterator(range(3))
    with pytest.raises(StopIteration):
        itr.skip(4)
    assert itr.n == 3


def test_take_truncates_and_tells_the_iterator_below() -> None:
    below = BufferedIterator(2, range(4, 10))
    itr = CountingIterator(below, start=4)
    assert itr.take(5) is itr
    assert (len(itr), len(below)) == (5, 1)
    assert list(itr) == [4]
    assert len(CountingIterator(range(3)).take(7)) == 3
    beyond = CountingIterator(BufferedIterator(2, range(4)), start=6).take(2)
    assert (len(beyond), beyond.has_next()) == (2, False)


def test_groups_are_lists_of_neighbours() -> None:
    assert list(GroupedIterator(range(10), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(GroupedIterator(range(10), 5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    itr = GroupedIterator(range(30), 3)
    assert (len(itr), itr.n, itr.chunk_size) == (10, 0, 3)
    assert itr.skip(4).n == 4
    assert next(itr) == [12, 13, 14]


def test_a_grouped_iterator_begins_where_its_source_is() -> None:
    source = CountingIterator(range(10)).skip(3)
    itr = GroupedIterator(source, 4)
    assert (itr.n, len(itr)) == (1, 3)
    assert list(itr) == [[3, 4, 5, 6], [7, 8, 9]]


def test_a_short_last_group_is_left_out_when_asked() -> None:
    source = CountingIterator(range(10))
    itr = GroupedIterator(source, 4, skip_remainder_batch=True)
    assert (len(itr), len(source)) == (2, 8)
    assert list(itr) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not source.has_next()
    assert list(GroupedIterator(range(3), 4, skip_remainder_batch=True)) == []


def test_the_number_of_groups_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    GroupedIterator(range(9), 2)
    GroupedIterator(range(9), 2, skip_remainder_batch=True)
    assert caplog.messages == [
        "grouped total_num_itrs = 5",
        "skip final residual batch, grouped total_num_itrs = 4",
    ]
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        GroupedIterator(range(9), 0)


class Source:
    """0 to n - 1, counting what was asked for; `fail` comes after the last."""

    def __init__(self, n: int, fail: BaseException | None = None) -> None:
        self.n_items, self.fail, self.asked = n, fail, 0

    def __len__(self) -> int:
        return self.n_items + (self.fail is not None)

    def __iter__(self) -> Iterator[int]:
        for i in range(self.n_items):
            self.asked = i + 1
            yield i
        if self.fail is not None:
            raise self.fail


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.002)


def test_a_buffered_iterator_gives_all_items_in_order() -> None:
    itr = BufferedIterator(3, Source(50))
    assert len(itr) == 50
    assert list(itr) == list(range(50))
    for _ in range(2):  # and the end stays the end
        with pytest.raises(StopIteration):
            next(itr)


def test_a_thread_fetches_ahead_as_far_as_the_buffer_and_no_further() -> None:
    source = Source(50)
    itr = BufferedIterator(3, source)
    assert source.asked == 0
    assert next(itr) == 0
    wait_until(lambda: source.asked == 5)  # 1 consumed, 3 held, 1 in hand
    time.sleep(0.02)
    assert source.asked == 5
    itr.close()


def test_taking_ends_the_source_too() -> None:
    source = Source(50)
    itr = BufferedIterator(3, source).take(5)
    assert list(itr) == [0, 1, 2, 3, 4]
    assert source.asked == 5
    late = BufferedIterator(3, Source(50))
    assert next(late) == 0
    assert list(late.take(2)) == [1]
    late.close()


@pytest.mark.parametrize("error", [KeyError("bad"), SystemExit(3)])
def test_an_exception_in_the_thread_reaches_the_consumer(error: BaseException) -> None:
    itr = BufferedIterator(2, Source(3, error))
    assert [next(itr) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            next(itr)
        assert raised.value is error


def test_an_item_may_be_an_exception() -> None:
    error = ValueError("an item")
    assert list(BufferedIterator(2, [error])) == [error]


def thread_of(itr: BufferedIterator) -> threading.Thread:
    assert itr._thread is not None
    return itr._thread


def test_the_thread_ends_when_the_consumer_does() -> None:
    itr = BufferedIterator(2, Source(1000))
    next(itr)
    thread, gone = thread_of(itr), weakref.ref(itr)
    del itr
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


def test_closing_ends_the_thread_and_the_items() -> None:
    itr = BufferedIterator(2, Source(1000))
    next(itr)
    thread = thread_of(itr)
    itr.close()
    assert not thread.is_alive()
    assert list(itr) == []
    itr.close()
    BufferedIterator(2, Source(3)).close()  # before it began


def test_a_buffer_needs_room() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        BufferedIterator(0, [1])


def test_an_empty_buffer_is_warned_of_after_five_minutes_and_then_every_fifteen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(iterators.time, "monotonic", lambda: now)
    itr = BufferedIterator(8, range(8))
    wanted = threading.Semaphore(0)
    itr._iterable = (wanted.acquire() and i for i in range(8))
    take = itr._next_item

    def read_and_take() -> Any:
        wanted.release()
        return take()

    monkeypatch.setattr(itr, "_next_item", read_and_take)
    warned = []
    for minutes in (4.9, 5.1, 10, 20.0, 20.2):
        now = 1000 + 60 * minutes
        next(itr)
        warned.append(len(caplog.messages))
    wanted.release(8)
    itr.close()
    assert warned == [0, 1, 1, 1, 2]
    assert caplog.messages[0].startswith(
        "Data loading buffer is empty or nearly empty."
    )
    assert "(--num-workers)" in caplog.messages[0]


def test_a_full_buffer_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    itr = BufferedIterator(4, Source(8))
    next(itr)
    wait_until(lambda: itr._channel.items.qsize() == 4)
    monkeypatch.setattr(itr, "_warn_after", 0.0)
    next(itr)
    assert caplog.messages == []
    itr.close()
