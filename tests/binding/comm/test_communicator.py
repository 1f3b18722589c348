"""Communicator: one rank, and backends that are Python objects."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from ctrainer import _C


class Handle:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class Backend:
    """Two ranks of which the other one's numbers are all 10."""

    rank, world_size = 1, 2

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []

    def begin(
        self, what: str, out: memoryview, in_: memoryview, dtype: str, op: str,
        root: int,
    ) -> Handle:  # fmt: skip
        self.asked.append((what, out.nbytes, in_.nbytes, dtype, op, root))
        if what == "all_reduce":
            values = np.frombuffer(in_, dtype)
            values += 10
        if what == "all_gather":
            values = np.frombuffer(out, dtype)
            values[: len(values) // 2] = 10
            values[len(values) // 2 :] = np.frombuffer(in_, dtype)
        return Handle(self.error)


def test_one_rank_keeps_what_it_has() -> None:
    alone = _C.Communicator()
    assert (alone.rank, alone.world_size, alone.backend) == (0, 1, "self")
    values, out = np.arange(3.0), np.zeros(3)
    assert alone.all_reduce(values, "mean") is None
    alone.all_gather(out, values)
    alone.barrier()
    assert values.tolist() == out.tolist() == [0.0, 1.0, 2.0]
    assert alone.gather_bytes(b"one") == [b"one"]
    assert alone.gather_bytes(b"") == [b""]
    assert alone.broadcast_bytes(b"two") == b"two"


def test_a_backend_is_asked_by_name_with_the_buffers() -> None:
    backend = Backend()
    group = _C.Communicator(backend)
    assert (group.rank, group.world_size, group.backend) == (1, 2, "python")
    values = np.arange(3, dtype=np.float32)
    group.all_reduce(values, op="max")
    assert values.tolist() == [10.0, 11.0, 12.0]
    group.reduce_scatter(np.zeros(1), np.zeros(2), "mean")
    group.all_to_all(np.zeros(2), np.zeros(2))
    group.broadcast(np.zeros(4, np.int64), root=1)
    group.barrier()
    assert backend.asked == [
        ("all_reduce", 0, 12, "float32", "max", 0),
        ("reduce_scatter", 8, 16, "float64", "mean", 0),
        ("all_to_all", 16, 16, "float64", "sum", 0),
        ("broadcast", 0, 32, "int64", "sum", 1),
        ("barrier", 0, 0, "float32", "sum", 0),
    ]


class Noting(Backend):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[bytes] = []

    def note_request(self, request: bytes) -> None:
        self.noted.append(request)


def test_requests_that_a_backend_has_noted_are_compared() -> None:
    backend = Noting()
    group = _C.Communicator(backend)
    for n in (3, 3, 4):
        group.all_reduce(np.zeros(n))
    one, same, other = backend.noted
    assert one == same  # though the arrays lie elsewhere
    assert _C.compare_requests([one, same]) is None
    with pytest.raises(
        ValueError, match=r"rank 0 called all_reduce of 3 float64.*of 4"
    ):
        _C.compare_requests([one, other])
    for wrong in ([], [one, one[1:]], [one, 3], (one, one)):
        with pytest.raises(TypeError, match="note_request"):
            _C.compare_requests(wrong)  # type: ignore[arg-type]


def test_a_group_is_split_by_its_backend() -> None:
    class Splits(Backend):
        def begin(self, what: str, out: Any, in_: Any, *more: Any) -> Handle:
            if what == "all_gather":  # the other rank wishes what this one does
                out[: in_.nbytes], out[in_.nbytes :] = in_, in_
            return Handle(None)

        def make_group(self, ranks: list[int]) -> Backend:
            self.asked.append(("group", ranks))
            return Backend()

    backend = Splits()
    made = _C.Communicator(backend).split(3)
    assert made is not None
    assert (made.rank, made.world_size) == (1, 2)
    assert backend.asked == [("group", [0, 1])]
    assert _C.Communicator(Splits()).split() is None


def test_what_cannot_be_split_is_named() -> None:
    alone = _C.Communicator()
    assert alone.split(0) is not None
    assert alone.split(ranks=[]) is None
    for wrong, text in (
        ({"color": -1}, "color must be 0 or more"),
        ({"color": 0, "ranks": [0]}, "not both"),
        ({"ranks": [0, 0]}, r"in \[0, 1\), got \[0, 0\]"),
        ({"ranks": [1]}, r"in \[0, 1\), got \[1\]"),
    ):
        with pytest.raises(ValueError, match=text):
            alone.split(**wrong)

    class Gathers(Backend):
        def begin(self, what: str, out: Any, in_: Any, *more: Any) -> Handle:
            out[: in_.nbytes], out[in_.nbytes :] = in_, in_
            return Handle(None)

    with pytest.raises(ValueError, match="it has no make_group"):
        _C.Communicator(Gathers()).split(0)


def test_bytes_of_different_lengths_are_gathered_padded() -> None:
    class Lengths(Backend):
        def begin(self, what: str, out: Any, in_: Any, *more: Any) -> Handle:
            if in_.nbytes == 8:  # lengths: the other rank has 2
                np.frombuffer(out, np.int64)[:] = [2, np.frombuffer(in_, np.int64)[0]]
            else:
                out[: in_.nbytes], out[in_.nbytes :] = b"ab" + bytes(3), in_
            return Handle(None)

    assert _C.Communicator(Lengths()).gather_bytes(b"12345") == [b"ab", b"12345"]


def test_a_collective_may_be_begun_and_waited_for() -> None:
    group = _C.Communicator(Backend())
    values = np.zeros(2)
    work = group.all_reduce(values, async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError, match="1 of its collectives"):
        group.close()
    work.wait()
    work.wait()
    group.close()
    assert values.tolist() == [10.0, 10.0]


def test_a_work_that_is_dropped_is_waited_for() -> None:
    waited = []

    class Slow(Backend):
        def begin(self, *args: Any) -> Any:
            class Waits:
                def wait(self) -> None:
                    waited.append(True)

            return Waits()

    group = _C.Communicator(Slow())
    group.all_reduce(np.zeros(2), async_op=True)
    gc.collect()
    assert waited == [True]
    group.close()


def test_one_rank_has_done_what_it_begins() -> None:
    work = _C.Communicator().all_reduce(np.ones(2), async_op=True)
    assert work is not None
    work.wait()


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (RuntimeError("peer is gone"), RuntimeError, "all_reduce on rank 1 of 2: peer"),
        (ValueError("no int16"), ValueError, "all_reduce on rank 1 of 2: no int16"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (MemoryError(), MemoryError, "^$"),
    ],
)
def test_a_backends_error_names_collective_and_rank(
    error: BaseException, expected: type[BaseException], text: str
) -> None:
    group = _C.Communicator(Backend(error))
    with pytest.raises(expected, match=text):
        group.all_reduce(np.zeros(2))
    work = group.all_reduce(np.zeros(2), async_op=True)
    assert work is not None
    with pytest.raises(expected, match=text):
        work.wait()
    group.close()


def test_operands_that_do_not_fit_are_rejected() -> None:
    alone = _C.Communicator()
    with pytest.raises(ValueError, match="op is 'avg'; expected sum, mean, max or min"):
        alone.all_reduce(np.zeros(2), "avg")
    with pytest.raises(ValueError, match="out must be like in"):
        alone.all_gather(np.zeros(2), np.zeros(3))
    with pytest.raises(TypeError, match=r"tensor is a list; expected a torch\.Tensor"):
        alone.all_reduce([1.0])
    with pytest.raises(ValueError, match="root must be 0"):
        alone.broadcast(np.zeros(2), 1)
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="tensor is read-only"):
        alone.all_reduce(fixed)
    group = _C.Communicator(Backend())
    with pytest.raises(ValueError, match="all_gather over 2 ranks needs 2 times"):
        group.all_gather(np.zeros(2), np.zeros(2))


def test_a_backend_without_sensible_ranks_is_rejected() -> None:
    class Wrong(Backend):
        rank = 2

    with pytest.raises(ValueError, match="rank is 2 and its world_size 2"):
        _C.Communicator(Wrong())
    with pytest.raises(AttributeError, match="world_size"):
        _C.Communicator(object())


def test_a_closed_group_says_so() -> None:
    group = _C.Communicator()
    group.close()
    group.close()
    for use in (group.barrier, lambda: group.rank, lambda: group.gather_bytes(b"")):
        with pytest.raises(ValueError, match="has been closed"):
            use()


def test_survives_every_failed_allocation() -> None:
    testcapi = pytest.importorskip("_testcapi")
    values = np.zeros(2)

    def use() -> list[bytes]:
        group = _C.Communicator(Backend())
        group.all_reduce(values, "mean")
        work = group.all_reduce(values, async_op=True)
        assert work is not None
        work.wait()
        return _C.Communicator().gather_bytes(b"all of it")

    for start in range(500):
        testcapi.set_nomemory(start, start + 1)
        try:
            done = use() == [b"all of it"]
        except MemoryError:
            done = False
        finally:
            testcapi.remove_mem_hooks()
        if done and start > 100:
            break
    assert done


def test_parts_of_different_lengths_are_gathered() -> None:
    group = _C.Communicator()
    out = np.full(3, 9.0)
    assert group.all_gather_padded(out, np.array([4.0, 5.0])) == [2]
    assert out.tolist() == [4.0, 5.0, 0.0]
    assert group.all_gather_padded(out=out, in_=np.zeros(0)) == [0]
    assert out.tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="gives 3 elements; a part of out has 2"):
        group.all_gather_padded(np.zeros(2), np.zeros(3))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        group.all_gather_padded(out, np.zeros(3))
    group.all_gather_padded(np.zeros(3), out)
    group.close()
    with pytest.raises(ValueError, match="closed"):
        group.all_gather_padded(np.zeros(3), out)


def test_a_gpu_is_served_by_a_group_over_nccl_alone() -> None:
    group = _C.Communicator()
    for other in (_C.Communicator(), group):
        with pytest.raises(ValueError, match="rank 0 of 1, by self, cannot serve"):
            group.serve_gpu(other)
        assert group.gpu is None
        assert other.world_size == 1
    with pytest.raises(TypeError, match="Communicator"):
        group.serve_gpu(None)  # type: ignore[arg-type]
    closed = _C.Communicator()
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        group.serve_gpu(closed)
