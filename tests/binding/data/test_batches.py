"""Batches by size, and the check of a data set's index."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrainer import _C


def cut(lengths: Any, *limits: int, by_function: bool = False) -> list[list[int]]:
    tokens = np.asarray(lengths, np.int64)
    indices = np.arange(len(tokens))
    how = (lambda i: int(tokens[i])) if by_function else tokens
    return [b.tolist() for b in _C.batch_by_size(indices, how, *limits)]


def by_the_rule(
    lengths: list[int], max_tokens: int, max_sentences: int, multiple: int
) -> list[list[int]]:
    """As many samples as fit, one by one; cut to a multiple; on with the rest."""
    batches, start = [], 0
    while start < len(lengths):
        count = 0
        for end in range(start + 1, len(lengths) + 1):
            padded = (end - start) * max(lengths[start:end])
            if padded > max_tokens > 0 or end - start > max_sentences > 0:
                break
            count = end - start
        if count > multiple:
            count -= count % multiple
        batches.append(list(range(start, start + count)))
        start += count
    return batches


@given(
    st.lists(st.integers(0, 30), max_size=60),
    st.integers(-1, 200),
    st.integers(-1, 20),
    st.integers(1, 12),
    st.booleans(),
)
def test_batches_are_those_of_the_rule(
    lengths: list[int],
    max_tokens: int,
    max_sentences: int,
    multiple: int,
    by_function: bool,
) -> None:
    if max_tokens > 0:
        lengths = [min(n, max_tokens) for n in lengths]
    limits = (max_tokens, max_sentences, multiple)
    assert cut(lengths, *limits, by_function=by_function) == by_the_rule(
        lengths, *limits
    )


def test_batches_are_views_of_the_indices_in_their_order() -> None:
    indices = np.array([7, 3, 9, 1])
    batches = _C.batch_by_size(indices, np.array([1, 1, 2, 2]), -1, 3, 1)
    assert [b.tolist() for b in batches] == [[7, 3, 9], [1]]
    assert all(b.base is indices for b in batches)


def test_the_function_is_called_with_each_index_as_an_int() -> None:
    asked: list[Any] = []

    def length(index: int) -> np.int32:
        asked.append(index)
        return np.int32(index)

    batches = _C.batch_by_size(np.array([5, 2]), length, 5, -1, 1)
    assert asked == [5, 2]
    assert all(type(i) is int for i in asked)
    assert [b.tolist() for b in batches] == [[5], [2]]


def test_no_samples_make_no_batches() -> None:
    assert cut([], 1, 1, 1) == []
    assert cut([], 1, 1, 8, by_function=True) == []


@pytest.mark.parametrize("by_function", [False, True])
def test_a_sample_beyond_max_tokens_is_an_error(by_function: bool) -> None:
    match = "Sentences lengths should not exceed max_tokens=10, .* position 2 has 11"
    with pytest.raises(ValueError, match=match):
        cut([1, 10, 11], 10, -1, 1, by_function=by_function)


def test_lengths_and_limits_beyond_32_bits_do_not_wrap() -> None:
    big = 2**62
    assert cut([big, big, 1], 2**63 - 1, -1, 1) == [[0], [1], [2]]
    assert cut([2**32, 2**32], 2**32, -1, 1) == [[0], [1]]
    with pytest.raises(OverflowError):
        cut([1], 2**63, -1, 1)


def test_an_error_of_the_function_is_passed_on() -> None:
    def length(index: int) -> int:
        if index == 3:
            raise KeyError(index)
        return 1

    with pytest.raises(KeyError, match="3"):
        _C.batch_by_size(np.arange(5), length, 9, -1, 1)
    with pytest.raises(TypeError):
        _C.batch_by_size(np.arange(5), lambda _: 1.5, 9, -1, 1)
    with pytest.raises(OverflowError):
        _C.batch_by_size(np.arange(5), lambda _: 2**64, 9, -1, 1)


def test_a_function_may_empty_the_array_of_indices() -> None:
    indices = np.arange(1000)

    def length(index: int) -> int:
        indices.resize(0, refcheck=False)
        return 1

    assert sum(map(len, _C.batch_by_size(indices, length, -1, 10, 1))) == 0


@pytest.mark.parametrize(
    ("indices", "lengths", "match"),
    [
        (np.arange(3.0), np.arange(3), "indices must be .* int64 in 1 dim"),
        (np.arange(4).reshape(2, 2), np.arange(4), "indices must be"),
        (np.arange(3), np.arange(3, dtype=np.int32), "num_tokens must be"),
        (np.arange(3), np.arange(6)[::2], "not contiguous"),
        (np.arange(3), np.arange(4), "4 lengths for 3 indices"),
    ],
)
def test_arrays_of_other_kinds_are_rejected(
    indices: Any, lengths: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        _C.batch_by_size(indices, lengths, 1, 1, 1)


def test_a_multiple_below_one_is_rejected() -> None:
    with pytest.raises(
        ValueError, match="required_batch_size_multiple must be at least"
    ):
        cut([1], 1, 1, 0)


def fails_cleanly(call: Callable[[], Any], expected: Any) -> int:
    """Lets each allocation fail in turn; returns how many failed."""
    testcapi = pytest.importorskip("_testcapi")
    for start in range(200):
        testcapi.set_nomemory(start)
        try:
            result = call()
        except MemoryError:
            continue
        finally:
            testcapi.remove_mem_hooks()
        assert [b.tolist() for b in result] == expected
        return start - 1
    raise AssertionError("it never succeeds")


def test_every_allocation_may_fail() -> None:
    indices, lengths = np.arange(2000), np.ones(2000, np.int64)
    expected = np.arange(2000).reshape(10, 200).tolist()

    def call() -> Any:
        return _C.batch_by_size(indices, lengths, -1, 200, 1)

    assert fails_cleanly(call, expected) > 10


def test_batching_leaves_no_reference_behind() -> None:
    indices, lengths = np.arange(100), np.ones(100, np.int64)
    for _ in range(3):
        _C.batch_by_size(indices, lambda i: 1, -1, 3, 1)
    before = sys.getrefcount(indices), sys.getrefcount(lengths)
    for _ in range(50):
        _C.batch_by_size(indices, lengths, -1, 3, 1)
        _C.batch_by_size(indices, lambda i: 1, -1, 3, 1)
        with pytest.raises(ValueError, match="exceed"):
            _C.batch_by_size(indices, np.full(100, 9), 8, 3, 1)
    assert (sys.getrefcount(indices), sys.getrefcount(lengths)) == before


def test_fairseqs_own_module_gives_the_same() -> None:
    try:
        cython = importlib.import_module("fairseq.data.data_utils_fast")
    except Exception as error:
        pytest.skip(f"fairseq's Cython module cannot be imported: {error}")
    random = np.random.default_rng(0)
    for _ in range(200):
        n, multiple = int(random.integers(1, 60)), int(random.integers(1, 10))
        lengths, indices = random.integers(0, 30, n), random.permutation(n)
        theirs = cython.batch_by_size_vec(indices, lengths, 60, 9, multiple)
        ours = _C.batch_by_size(indices, lengths, 60, 9, multiple)
        assert [b.tolist() for b in ours] == [b.tolist() for b in theirs]


def test_an_index_is_checked_against_the_data() -> None:
    sizes, offsets = np.array([3, 2], np.int32), np.array([0, 12])
    _C.check_index(sizes, offsets, 4, 20)
    with pytest.raises(ValueError, match=r"item 1 .* beyond the 19 bytes"):
        _C.check_index(sizes, offsets, 4, 19)
    with pytest.raises(ValueError, match="as many int32 sizes as int64 offsets"):
        _C.check_index(sizes, offsets[:1], 4, 20)
    with pytest.raises(ValueError, match="elements of 0"):
        _C.check_index(sizes, offsets, 0, 20)
