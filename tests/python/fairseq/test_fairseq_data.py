"""Batching, filtering and collation of fairseq's data sets."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_alone

from ctrainer.fairseq import data_utils
from ctrainer.fairseq.concat_dataset import ConcatDataset
from ctrainer.fairseq.data_utils import batch_by_size, collate_tokens, numpy_seed
from ctrainer.fairseq.fairseq_dataset import FairseqDataset
from ctrainer.fairseq.indexed_dataset import make_builder
from ctrainer.fairseq.iterators import EpochBatchIterator


def plain(batches: list[Any]) -> list[list[int]]:
    return [b.tolist() for b in batches]


@pytest.mark.parametrize("seeds", [(3,), (3, 1), (3, 1, 7)])
def test_numpy_is_seeded_for_the_body_and_restored(seeds: tuple[int, ...]) -> None:
    np.random.seed(99)
    expected = np.random.rand()
    np.random.seed(99)
    with numpy_seed(*seeds):
        inside = np.random.rand()
    assert np.random.rand() == expected
    one = seeds[0] if len(seeds) == 1 else int(hash(seeds) % 1e6)
    assert inside == np.random.RandomState(one).rand()


def test_the_generator_is_restored_after_an_error_and_none_seeds_nothing() -> None:
    np.random.seed(99)
    expected = np.random.rand(2).tolist()
    np.random.seed(99)
    with pytest.raises(KeyError), numpy_seed(1):
        raise KeyError
    with numpy_seed(None):
        first = np.random.rand()
    assert [first, np.random.rand()] == expected


def test_limits_of_none_are_no_limits() -> None:
    lengths = [5, 5, 5, 5]
    assert plain(batch_by_size(range(4), None, lengths)) == [[0, 1, 2, 3]]
    by_function = batch_by_size([3, 1, 2], lambda i: 5, max_tokens=10.0)
    assert plain(by_function) == [[3, 1], [2]]
    assert plain(batch_by_size(range(4), None, lengths, max_sentences=3)) == [
        [0, 1, 2],
        [3],
    ]
    assert (
        batch_by_size([], None, [], max_tokens=1, required_batch_size_multiple=8) == []
    )


def test_a_last_batch_that_is_no_multiple_is_left_out_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ones = np.ones(11, np.int32)
    batches = batch_by_size(
        np.arange(11), None, ones, max_sentences=8, required_batch_size_multiple=4
    )
    assert plain(batches) == [list(range(8))]
    assert caplog.messages == [
        "the last 3 of 11 samples are left out: they make no batch of a multiple of "
        "required_batch_size_multiple=4"
    ]
    even = batch_by_size(range(8), None, ones[:8], required_batch_size_multiple=4)
    assert len(even) == 1
    assert len(caplog.messages) == 1


def test_integers_of_any_kind_are_taken_and_nothing_else() -> None:
    for dtype in (np.int32, np.uint16, ">i8"):
        lengths = np.array([1, 2], dtype)
        assert plain(batch_by_size(lengths, None, lengths)) == [[1, 2]]
    with pytest.raises(TypeError, match="expected integers, got an array of float64"):
        batch_by_size(range(2), None, np.ones(2))


# ---- a data set ----------------------------------------------------------------------


class Sized(FairseqDataset):
    def __init__(self, lengths: list[int], vector: bool = True) -> None:
        self.lengths, self.vector = lengths, vector

    def __len__(self) -> int:
        return len(self.lengths)

    def num_tokens(self, index: int) -> int:
        return self.lengths[index]

    def num_tokens_vec(self, indices: Any) -> Any:
        return (
            np.array(self.lengths)[indices]
            if self.vector
            else super().num_tokens_vec(0)
        )

    def size(self, index: int) -> Any:
        return self.lengths[index]


@pytest.mark.parametrize("vector", [False, True])
def test_a_data_set_batches_by_its_vector_or_one_by_one(vector: bool) -> None:
    dataset = Sized([4, 4, 4, 2, 2], vector)
    indices = dataset.ordered_indices()
    assert (indices.dtype, indices.tolist()) == (np.int64, [0, 1, 2, 3, 4])
    assert plain(dataset.batch_by_size(indices, max_tokens=8)) == [[0, 1], [2, 3], [4]]


def test_what_a_data_set_does_not_say_it_does_not_have() -> None:
    dataset = FairseqDataset()
    assert dataset.can_reuse_epoch_itr_across_epochs is True
    assert dataset.supports_prefetch is False
    assert dataset.supports_fetch_outside_dataloader is True
    assert dataset.attr("nothing", 0) is None
    dataset.set_epoch(2)
    for call in (
        dataset.__getitem__,
        dataset.num_tokens,
        dataset.size,
        dataset.prefetch,
    ):
        with pytest.raises(NotImplementedError):
            call(0)


# ---- filters -------------------------------------------------------------------------


class Pairs(Sized):
    """Sizes of source and target, in whatever form size() is to return them."""

    def __init__(self, sizes: list[Any]) -> None:
        super().__init__(sizes)


@pytest.mark.parametrize(
    ("sizes", "limit", "kept"),
    [
        ([1, 5, 3], 3, [0, 2]),
        ([1, 5, 3], 4.5, [0, 2]),
        ([1, 5, 3], (9, 4), [0, 2]),
        ([(1, 9), (2, 2), (9, 1)], (5, 5), [1]),
        ([(1, 9), (2, 2), (9, 1)], (5, None), [0, 1]),
        ([(1, None), (9, None)], (5, 5), [0]),
        ([{"a": (1, 1), "b": (9,)}, {"a": (9, 1)}], {"a": (5, 5), "c": (0,)}, [0]),
    ],
)
def test_samples_within_the_limit_are_kept(sizes: Any, limit: Any, kept: Any) -> None:
    dataset, indices = Pairs(sizes), np.arange(len(sizes))
    inside, ignored = dataset.filter_indices_by_size(indices, limit)
    assert (inside.tolist(), inside.dtype) == (kept, np.int64)
    assert ignored == [i for i in range(len(sizes)) if i not in kept]


@pytest.mark.parametrize("wrap", [lambda sizes: sizes, lambda sizes: [sizes]])
def test_an_array_of_sizes_is_compared_at_once(wrap: Any) -> None:
    dataset = Sized([])  # whose size() would fail
    dataset.sizes = wrap(np.array([7, 1, 5, 3]))
    kept, ignored = dataset.filter_indices_by_size(np.array([3, 0, 1, 2]), 4)
    assert (kept.tolist(), ignored) == ([3, 1], [0, 2])


def test_a_dict_of_limits_needs_a_dict_of_sizes() -> None:
    with pytest.raises(
        TypeError, match="max_positions is a dict, but a sample's size is"
    ):
        Pairs([3]).filter_indices_by_size(np.arange(1), {"a": (1,)})


def test_samples_that_are_too_large_are_reported_or_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = Sized(list(range(20)))
    _, ignored = dataset.filter_indices_by_size(np.arange(20), 5)
    data_utils.report_ignored(dataset, ignored, 5, False)
    assert caplog.messages == [
        "14 samples have invalid sizes and will be skipped, max_positions=5, first few "
        "sample ids=[6, 7, 8, 9, 10, 11, 12, 13, 14, 15]"
    ]
    text = (
        r"^Size of sample #6 is invalid \(=6\) since max_positions=5, skip this "
        "example with --skip-invalid-size-inputs-valid-test$"
    )
    with pytest.raises(Exception, match=text):
        data_utils.report_ignored(dataset, ignored, 5, True)


def test_pairs_are_filtered_by_both_sizes() -> None:
    source, target, all_of = np.array([1, 9, 2]), np.array([1, 1, 9]), np.arange(3)
    filtered = data_utils.filter_paired_dataset_indices_by_size
    assert filtered(source, target, all_of, None)[1] == []
    for limit, kept, ignored in (
        (5, [0], [1, 2]),
        ((9, 5), [0, 1], [2]),
        ([5, 9], [0, 2], [1]),
    ):
        inside, outside = filtered(source, target, all_of, limit)
        assert (inside.tolist(), outside) == (kept, ignored)
    assert filtered(source, None, all_of, 5)[0].tolist() == [0, 2]


def test_languages_are_read_off_the_names_of_files(tmp_path: Path) -> None:
    assert data_utils.infer_language_pair(str(tmp_path)) == [None, None]
    (tmp_path / "dict.de.txt").touch()
    assert data_utils.infer_language_pair(str(tmp_path)) == [None, None]
    (tmp_path / "train.de-en.de.idx").touch()
    assert data_utils.infer_language_pair(str(tmp_path)) == ["de", "en"]


def test_collect_filtered_keeps_what_it_leaves_out() -> None:
    left: list[int] = []
    kept = data_utils.collect_filtered(lambda i: i % 2 == 0, range(5), left)
    assert (list(kept), left) == ([0, 2, 4], [1, 3])


# ---- collation -----------------------------------------------------------------------


def rows(lists: list[list[int]], pad: int, **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    return collate_tokens([torch.tensor(v) for v in lists], pad, **options).tolist()


def test_tokens_are_padded_on_the_right_or_the_left() -> None:
    assert rows([[1, 2, 3], [4]], 0) == [[1, 2, 3], [4, 0, 0]]
    assert rows([[1, 2, 3], [4]], 7, left_pad=True) == [[1, 2, 3], [7, 7, 4]]


def test_the_end_of_a_sentence_moves_to_its_beginning() -> None:
    values = [[1, 2, 9], [3, 9]]
    assert rows(values, 0, move_eos_to_beginning=True) == [[9, 1, 2], [9, 3, 0]]
    moved = rows(values, 0, eos_idx=8, move_eos_to_beginning=True, left_pad=True)
    assert moved == [[8, 1, 2], [0, 8, 3]]


@given(
    st.lists(
        st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=5
    ),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 8)),
    st.booleans(),
)
def test_a_batch_has_the_height_and_width_that_were_asked_for(
    values: list[list[int]],
    length: int | None,
    multiple: int,
    height: int | None,
    left: bool,
) -> None:
    out = rows(
        values, 0, left_pad=left, pad_to_length=length, pad_to_multiple=multiple,
        pad_to_bsz=height,
    )  # fmt: skip
    width = max(len(v) for v in values)
    width = math.ceil(max(width, length or 0) / multiple) * multiple
    assert len(out) == max(len(values), height or 0)
    for i, row in enumerate(out):
        value = values[i] if i < len(values) else []
        padding = [0] * (width - len(value))
        assert row == (padding + value if left else value + padding)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "float16", "bool"])
def test_a_batch_has_the_dtype_of_its_values(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = [torch.ones(n, dtype=getattr(torch, dtype)) for n in (2, 1)]
    out = collate_tokens(values, 0)
    assert out.dtype == values[0].dtype
    assert out.tolist() == [[1, 1], [1, 0]]


def test_tensors_that_are_no_plain_memory_are_collated_all_the_same() -> None:
    torch = pytest.importorskip("torch")

    class Marked(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    marked = torch.tensor([1, 2, 9]).as_subclass(Marked)
    strided = torch.arange(10)[::4]
    out = collate_tokens([marked, torch.tensor([5])], 0)
    assert out.tolist() == [[1, 2, 9], [5, 0, 0]]
    assert collate_tokens([strided, strided[:1]], 3).tolist() == [[0, 4, 8], [0, 3, 3]]
    moved = collate_tokens([marked, strided], 0, eos_idx=7, move_eos_to_beginning=True)
    assert moved.tolist() == [[7, 1, 2], [7, 0, 4]]
    last = collate_tokens([strided, strided[:0]], 0, move_eos_to_beginning=True)
    assert last.tolist() == [[8, 0, 4], [0, 0, 0]]
    meta = collate_tokens([torch.empty(3, device="meta").long()], 0)
    assert (meta.device.type, meta.shape) == ("meta", (1, 3))


def test_gradients_pass_through_collation() -> None:
    torch = pytest.importorskip("torch")
    value = torch.ones(3, requires_grad=True)
    collate_tokens([value, torch.ones(5)], 0).sum().backward()
    assert value.grad.tolist() == [1, 1, 1]


def test_the_modules_of_data_need_no_torch() -> None:
    names = ("data_utils", "iterators", "indexed_dataset")
    done = run_alone("loaded", *(f"ctrainer.fairseq.{n}" for n in names), "--", "torch")
    done.check_returncode()
    assert done.stdout.strip() == "[]"


# ---- several data sets ---------------------------------------------------------------


def write(prefix: Path, items: list[list[int]]) -> str:
    builder = make_builder(f"{prefix}.bin", "mmap")
    for item in items:
        builder.add_item(np.array(item, np.int64))
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_a_data_set_is_loaded_with_its_parts(tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("torch")
    caplog.set_level("INFO")
    prefix = write(tmp_path / "train", [[1, 2], [3]])
    write(tmp_path / "train1", [[4]])
    write(tmp_path / "train3", [[5]])  # after a gap: not a part
    whole = data_utils.load_indexed_dataset(prefix, combine=True)
    assert [whole[i].tolist() for i in range(len(whole))] == [[1, 2], [3], [4]]
    assert caplog.messages[0] == f"loaded 2 examples from: {prefix}"
    alone = data_utils.load_indexed_dataset(prefix)
    assert [alone[i].tolist() for i in range(len(alone))] == [[1, 2], [3]]
    assert (
        data_utils.load_indexed_dataset(str(tmp_path / "valid"), combine=True) is None
    )
    assert len(data_utils.load_indexed_dataset(prefix, dataset_impl="mmap")) == 2


def test_data_sets_follow_each_other_as_often_as_they_are_asked_for() -> None:
    both = ConcatDataset([Sized([5, 3]), Sized([4, 9, 1])], [2, 1])
    assert (len(both), both.cumulative_sizes) == (7, [4, 7])
    assert [both.size(i) for i in range(7)] == [5, 3, 5, 3, 4, 9, 1]
    assert both.num_tokens(5) == 9
    for i in (-1, 7):
        with pytest.raises(IndexError, match=f"sample {i} of 7"):
            both.size(i)
    with pytest.raises(ValueError, match="should not be an empty"):
        ConcatDataset([])
    with pytest.raises(ValueError, match="sample_ratios has 1 numbers for 2 data sets"):
        ConcatDataset([Sized([1])] * 2, [1])


def test_concatenated_data_sets_are_ordered_by_size() -> None:
    one, two = Sized([5, 3]), Sized([4])
    one.sizes, two.sizes = np.array([5, 3]), [np.array([4])]
    both = ConcatDataset([one, two], 2)
    assert both.sizes.tolist() == [5, 3, 5, 3, 4, 4]
    assert both.sizes[both.ordered_indices()].tolist() == [3, 3, 4, 4, 5, 5]
    one.sizes, two.sizes = np.array([[2, 9], [1, 5]]), np.array([[1, 4]])
    pairs = ConcatDataset([one, two])
    assert pairs.ordered_indices().tolist() == [2, 1, 0]  # by source, then by target


def test_a_concatenation_passes_on_what_it_is_told() -> None:
    class Told(Sized):
        can_reuse_epoch_itr_across_epochs = True
        supports_prefetch = True
        label = "told"

        def prefetch(self, indices: Any) -> None:
            self.prefetched = list(indices)

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def collater(self, samples: list[Any]) -> Any:
            return ["collated", *samples]

    parts = [Told([1, 2]), Told([3])]
    both = ConcatDataset(parts, [2, 1])
    both.prefetch([4, 3, 0])
    both.set_epoch(6)
    assert [p.prefetched for p in parts] == [[1, 0], [0]]
    assert [p.epoch for p in parts] == [6, 6]
    assert (both.supports_prefetch, both.can_reuse_epoch_itr_across_epochs) == (
        True,
        True,
    )
    assert (both.attr("label", 4), both.attr("nothing", 0)) == ("told", None)
    assert both.collater([1]) == ["collated", 1]
    mixed = ConcatDataset([parts[0], [1, 2]])
    mixed.prefetch([0, 2])
    mixed.set_epoch(7)
    assert (mixed.supports_prefetch, mixed.can_reuse_epoch_itr_across_epochs) == (
        False,
    ) * 2


class Lengths(Sized):
    def __getitem__(self, index: int) -> int:
        return self.lengths[index]


def test_batches_by_size_become_epochs() -> None:
    pytest.importorskip("torch")
    dataset = Lengths([3, 1, 2, 3, 3, 1])
    order = np.argsort(dataset.lengths, kind="stable")
    batches = dataset.batch_by_size(order, max_tokens=6)
    epochs = EpochBatchIterator(dataset, list, batches, num_shards=2, shard_id=1)
    seen = [b for _ in range(2) for b in epochs.next_epoch_itr(shuffle=False)]
    assert [b.tolist() for b in batches] == [[1, 5, 2], [0, 3], [4]]
    assert seen == [[3, 3], []] * 2
