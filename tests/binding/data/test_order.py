"""Orders by length, and rows moved: transformers' and NumPy's."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrainer import _C
from ctrainer.adapters import lengths as by_length

SOME = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 9), min_size=1, max_size=300)


@given(values=SOME, batch_size=st.integers(1, 20))
def test_groups_are_those_of_transformers(values: list[int], batch_size: int) -> None:
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers.trainer_pt_utils")
    generator = torch.Generator().manual_seed(len(values))
    expected = hf.get_length_grouped_indices(values, batch_size, generator=generator)
    generator.manual_seed(len(values))
    order = torch.randperm(len(values), generator=generator).numpy()
    by_length.group(order, by_length.as_lengths(values), batch_size)
    assert order.tolist() == expected


@pytest.mark.parametrize(
    "values",
    [
        [1.5, 0.25, 7.0],
        [2**40, 3, 2**33],
        np.array([3, 250, 9], np.uint8),
        [True, False],
    ],
)
def test_lengths_of_any_kind_order_alike(values: Any) -> None:
    order = by_length.longest_first(by_length.as_lengths(values))
    assert order.tolist() == np.argsort(values, kind="stable")[::-1].tolist()


@pytest.mark.parametrize("shape", [(0,), (7,), (5, 3), (4, 2, 3), (3, 0)])
@pytest.mark.parametrize("dtype", ["int8", "float32", "complex128"])
def test_rows_are_where_they_were_sent(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 100, shape).astype(dtype)
    to = rng.permutation(shape[0])
    expected = np.empty_like(rows)
    expected[to] = rows
    _C.move_rows(rows, to)
    assert np.array_equal(rows, expected)


def test_faults_are_named() -> None:
    order, lengths = np.array([0, 2]), np.array([5, 6], np.int32)
    with pytest.raises(ValueError, match=r"index 2 at place 1 .* \[0, 2\)"):
        _C.order_by_length(order, lengths, 1, False)
    with pytest.raises(ValueError, match=r"lengths must be .* int32"):
        _C.order_by_length(order, order, 1, False)
    with pytest.raises(ValueError, match="at least one sample"):
        _C.order_by_length(order, lengths, -3, False)
    rows = np.arange(3)
    with pytest.raises(ValueError, match="2 places for 3 rows"):
        _C.move_rows(rows, order)
    with pytest.raises(ValueError, match=r"each of 0 \.\. 2 once"):
        _C.move_rows(rows, np.array([0, 0, 1]))
    rows.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        _C.move_rows(rows, np.array([0, 2, 1]))
    assert rows.tolist() == [0, 1, 2]
