"""BatchShard distributes batches as accelerate's BatchSamplerShard does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrainer.adapters._numpy_batches import DataLoader
from ctrainer.adapters.batch_shard import BatchShard
from ctrainer.arguments.accelerator import BatchPlan


def batches(n: int, size: int, drop_last: bool) -> list[list[int]]:
    found = [list(range(i, min(i + size, n))) for i in range(0, n, size)]
    return [b for b in found if len(b) == size or not drop_last]


def batches_of(n: int, size: int, ranks: int, **options: bool) -> list[list[list[int]]]:
    source = batches(n, size, options.get("drop_last", False))
    return [
        list(BatchShard(rank, ranks, size, **options).of(source))
        for rank in range(ranks)
    ]


def test_the_last_round_is_filled_up_from_the_beginning() -> None:
    assert batches_of(10, 2, 2) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    assert batches_of(9, 2, 2) == [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]
    assert batches_of(1, 2, 2) == [[[0, 0]], [[0, 0]]]


def test_uneven_or_dropped_where_asked() -> None:
    assert batches_of(9, 2, 2, even=False) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert batches_of(9, 2, 2, drop_last=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_split_batches_are_cut_into_equal_parts() -> None:
    assert batches_of(7, 4, 2, split=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert batches_of(5, 4, 2, split=True, even=False) == [[[0, 1], [4]], [[2, 3]]]


def test_batches_of_any_length_stay_whole() -> None:
    source = [[0], [1, 2, 3], [4, 5]]
    parts = [list(BatchShard(rank, 2).of(source)) for rank in range(2)]
    assert parts == [[[0], [4, 5]], [[1, 2, 3], [0]]]


def test_a_short_batch_in_the_middle_is_distributed() -> None:
    source = [[0, 1], [2], [3, 4], [5, 6]]
    parts = [list(BatchShard(rank, 2, 2).of(source)) for rank in range(2)]
    assert parts == [[[0, 1], [3, 4]], [[2], [5, 6]]]


def test_nothing_is_read_ahead_of_a_whole_round() -> None:
    source = iter(batches(8, 2, False))
    next(BatchShard(0, 2, 2).of(source))
    assert list(source) == [[4, 5], [6, 7]]


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(0, 40),
    size=st.integers(1, 6),
    ranks=st.integers(1, 5),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_equal_to_accelerate(n, size, ranks, flags) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    from torch.utils.data import BatchSampler

    split, even, drop_last = flags
    size = size * ranks if split else size
    sampler = BatchSampler(range(n), size, drop_last)
    for rank in range(ranks):
        theirs = data_loader.BatchSamplerShard(sampler, ranks, rank, split, even)
        options = {"split": split, "even": even, "drop_last": drop_last}
        shard = BatchShard(rank, ranks, size, **options)
        ours = list(shard.of(sampler))
        assert ours == list(theirs)
        count = shard.count(len(sampler))
        assert count == len(theirs)
        plan = BatchPlan(rank, ranks, split, False, even, True)
        loader = DataLoader(range(n), size, range(n), list, drop_last, plan)
        assert list(loader) == ours
        assert len(loader) == count


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 0), {}, r"rank is 0; expected one in \[0, 0\)"),
        ((2, 2), {}, r"rank is 2; expected one in \[0, 2\)"),
        ((0, 2, 3), {"split": True}, "to 2 ranks, and a batch has 3 items"),
    ],
)
def test_what_cannot_be_distributed_is_rejected(arguments, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        BatchShard(*arguments, **options)


def test_an_error_of_the_source_comes_through() -> None:
    shard = BatchShard(0, 1, 1).of(map([[0]].__getitem__, itertools.count()))
    assert next(shard) == [0]
    with pytest.raises(IndexError):
        next(shard)
