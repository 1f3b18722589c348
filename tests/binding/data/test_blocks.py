"""Blocks of a stream of tokens."""

from typing import Any

import numpy as np
import pytest

from ctrainer import _C

testcapi = pytest.importorskip("_testcapi")
SIZES = np.array([3, 5, 1, 9, 2])


def test_rows_say_where_blocks_are() -> None:
    rows = np.frombuffer(_C.token_blocks(SIZES, "none", 8, 1), np.int64)
    assert rows.reshape(-1, 5).tolist() == [
        [0, 8, 0, 0, 1], [8, 16, 2, 0, 3], [16, 20, 3, 7, 4]
    ]  # fmt: skip


def test_a_stream_of_nothing_has_no_blocks() -> None:
    for mode in ("none", "complete", "complete_doc", "eos"):
        assert _C.token_blocks(SIZES[:0], mode, 8, 1) == b""


@pytest.mark.parametrize(
    ("sizes", "mode", "message"),
    [
        (SIZES.astype(np.int32), "none", "array of int64, got the format i"),
        (SIZES.astype(np.float64), "none", "array of int64, got the format d"),
        (-SIZES, "eos", "item 0 has size -3"),
        (SIZES, "lines", "Invalid break_mode: lines; expected none"),
    ],
)
def test_what_cannot_be_is_rejected(sizes: Any, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.token_blocks(sizes, mode, 8, 1)


def blocks_with(failing: int) -> Any:
    """The blocks when the allocation of that number, and all after it, fail."""
    testcapi.set_nomemory(failing)
    try:
        return _C.token_blocks(SIZES, "none", 8, 1)
    except MemoryError:
        return None
    finally:
        testcapi.remove_mem_hooks()


def test_every_allocation_may_fail() -> None:
    found = [blocks_with(failing) for failing in range(20)]
    whole = _C.token_blocks(SIZES, "none", 8, 1)
    assert found[0] is None
    assert found[-1] == whole
    assert all(rows is None or rows == whole for rows in found)


def test_strides_are_rejected() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        _C.token_blocks(SIZES[::2], "none", 8, 1)
