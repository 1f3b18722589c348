"""Rows of a padded batch, copied in C."""

import sys
from typing import Any

import numpy as np
import pytest

from ctrainer import _C


def padded(values: Any, dtype: str = "int64", **options: Any) -> Any:
    out = np.full((3, 5), 7, dtype)
    arrays = [np.array(v, dtype) for v in values]
    how = (options.get("left", False), options.get("rotate", False))
    assert _C.pad_rows(out, arrays, *how, options.get("first")) is True
    return out.tolist()


@pytest.mark.parametrize(
    "dtype", ["int64", "int32", "int16", "uint8", "float32", "float16"]
)
def test_values_are_copied_into_rows(dtype: str) -> None:
    rows = padded([[1, 2, 3], [], [4, 5, 6, 8, 9]], dtype)
    assert rows == [[1, 2, 3, 7, 7], [7] * 5, [4, 5, 6, 8, 9]]
    rows = padded([[1, 2]], dtype, left=True)
    assert rows == [[7, 7, 7, 1, 2], [7] * 5, [7] * 5]


def test_a_rotated_row_begins_with_the_last_value_or_another() -> None:
    assert padded([[1, 2, 3]], rotate=True)[0] == [3, 1, 2, 7, 7]
    nine = np.array([9])
    assert padded([[1, 2, 3]], rotate=True, left=True, first=nine)[0] == [7, 7, 9, 1, 2]


@pytest.mark.parametrize(
    "values",
    [
        [np.arange(3), np.arange(3, dtype=np.int32)],
        [np.arange(6)[::2]],
        [np.arange(4).reshape(2, 2)],
        [[1, 2]],
        [np.arange(3).astype(">i8")],
        [None],
    ],
)
def test_what_is_no_plain_memory_of_the_dtype_is_left_to_another_way(
    values: Any,
) -> None:
    assert _C.pad_rows(np.zeros((2, 5), np.int64), values, False, False, None) is False


def test_the_batch_and_the_first_item_have_to_be_plain_too() -> None:
    values, one = [np.arange(3)], np.array([1])
    for out in (np.zeros(5, np.int64), np.zeros((2, 10), np.int64)[:, ::2], [[0]]):
        assert _C.pad_rows(out, values, False, False, None) is False
    for first in (np.array([1, 2]), np.array([1.0]), 5):
        out = np.zeros((2, 5), np.int64)
        assert _C.pad_rows(out, values, False, True, first) is False
    assert _C.pad_rows(np.zeros((2, 5), np.int64), values, False, True, one) is True


def test_what_does_not_fit_is_an_error() -> None:
    out = np.zeros((1, 2), np.int64)
    with pytest.raises(ValueError, match="value 0 has 3 items, a row has 2"):
        _C.pad_rows(out, [np.arange(3)], False, False, None)
    with pytest.raises(ValueError, match="2 values for 1 rows"):
        _C.pad_rows(out, [np.arange(1)] * 2, False, False, None)
    with pytest.raises(TypeError, match="not iterable"):
        _C.pad_rows(out, 5, False, False, None)
    with pytest.raises(ZeroDivisionError):
        _C.pad_rows(out, (1 // i for i in range(1)), False, False, None)


def test_a_generator_of_values_is_kept_alive() -> None:
    out = np.zeros((3, 2), np.int64)
    assert _C.pad_rows(out, (np.full(2, i) for i in range(3)), False, False, None)
    assert out.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_no_reference_is_left_behind() -> None:
    out, value, first = np.zeros((2, 5), np.int64), np.arange(3), np.array([1])
    before = [sys.getrefcount(x) for x in (out, value, first)]
    for _ in range(50):
        _C.pad_rows(out, [value, value], True, True, first)
        _C.pad_rows(out, [value, None], True, True, first)
        with pytest.raises(ValueError, match="values for"):
            _C.pad_rows(out, [value] * 3, True, True, first)
    assert [sys.getrefcount(x) for x in (out, value, first)] == before
