"""Indexed data sets in fairseq's two formats: written, read, cut off and corrupted."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_alone

torch = pytest.importorskip("torch")

from ctrainer.fairseq.indexed_dataset import (  # noqa: E402
    IndexedRawTextDataset,
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    best_fitting_int_dtype,
    dataset_exists,
    get_available_dataset_impl,
    infer_dataset_impl,
    make_builder,
    make_dataset,
)

ITEMS = [[5, 6, 7], [], [8], [1, 2, 3, 4]]
same_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "uint16", "uint32"]


def build(folder: Path, items: Any = ITEMS, **options: Any) -> str:
    prefix = str(folder / "train")
    builder = make_builder(prefix + ".bin", "mmap", **options)
    for item in items:
        builder.add_item(torch.tensor(item, dtype=torch.long))
    builder.finalize(prefix + ".idx")
    return prefix


def lists(dataset: Any) -> list[list[int]]:
    return [dataset[i].tolist() for i in range(len(dataset))]


def mmap_index(code: int, sizes: list[int], offsets: list[int]) -> bytes:
    """The format, written out: magic, version, dtype's code, count, sizes, offsets."""
    n = len(sizes)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, code, n)
    return head + struct.pack(f"<{n}i", *sizes) + struct.pack(f"<{n}q", *offsets)


def test_what_is_written_is_fairseqs_format_to_the_byte(tmp_path: Path) -> None:
    prefix = build(tmp_path, vocab_size=1000)
    expected = mmap_index(8, [3, 0, 1, 4], [0, 6, 6, 8])
    assert Path(prefix + ".idx").read_bytes() == expected
    flat = [i for item in ITEMS for i in item]
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<8H", *flat)


@given(
    st.lists(st.lists(st.integers(0, 120), max_size=6), max_size=8),
    st.sampled_from(DTYPES),
)
@same_folder
def test_what_is_written_is_read(tmp_path: Path, items: Any, dtype: str) -> None:
    prefix = str(tmp_path / dtype)
    builder = MMapIndexedDatasetBuilder(prefix + ".bin", np.dtype(dtype))
    for item in items:
        builder.add_item(torch.tensor(item, dtype=torch.long))
    builder.finalize(prefix + ".idx")
    dataset = MMapIndexedDataset(prefix)
    assert (len(dataset), dataset.dtype) == (len(items), np.dtype(dtype))
    assert lists(dataset) == items
    assert dataset.sizes.tolist() == [len(item) for item in items]
    for i, item in enumerate(items):
        assert dataset[i].dtype == torch.int64
        assert (dataset.size(i), dataset.num_tokens(i)) == (len(item), len(item))
        assert dataset.array(i).dtype == np.dtype(dtype)


def test_items_are_the_files_own_memory(tmp_path: Path) -> None:
    prefix = str(tmp_path / "train")
    with open(prefix + ".bin", "wb") as file:
        file.write(np.arange(100_000).tobytes())
    Path(prefix + ".idx").write_bytes(mmap_index(5, [60_000, 40_000], [0, 480_000]))
    dataset = MMapIndexedDataset(prefix)
    base = dataset.array(0).ctypes.data
    assert dataset[0].data_ptr() == base
    assert dataset[1].data_ptr() == dataset.array(1).ctypes.data == base + 480_000
    assert dataset[1][0].item() == 60_000


def test_writing_to_an_item_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    prefix = str(tmp_path / "train")
    builder = MMapIndexedDatasetBuilder(prefix + ".bin", np.int64)
    builder.add_item(torch.tensor([1, 2]))
    builder.finalize(prefix + ".idx")
    before = Path(prefix + ".bin").read_bytes()
    MMapIndexedDataset(prefix)[0].fill_(9)
    assert Path(prefix + ".bin").read_bytes() == before
    assert lists(MMapIndexedDataset(prefix)) == [[1, 2]]
    with pytest.raises(ValueError, match="read-only"):
        MMapIndexedDataset(prefix).array(0)[0] = 1


def test_items_outlive_the_data_set(tmp_path: Path) -> None:
    dataset = MMapIndexedDataset(build(tmp_path))
    item, array = dataset[0], dataset.array(3)
    del dataset
    assert (item.tolist(), array.tolist()) == ([5, 6, 7], [1, 2, 3, 4])


def test_an_item_that_there_is_not_is_an_index_error(tmp_path: Path) -> None:
    prefix = build(tmp_path)
    assert MMapIndexedDataset(prefix)[-1].tolist() == [1, 2, 3, 4]
    for i in (4, -5):
        with pytest.raises(IndexError):
            MMapIndexedDataset(prefix)[i]


def test_a_data_set_is_pickled_by_its_path(tmp_path: Path) -> None:
    dataset = MMapIndexedDataset(build(tmp_path))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 400
    assert lists(pickle.loads(pickled)) == ITEMS
    loader = torch.utils.data.DataLoader(dataset, None, num_workers=1)
    assert [item.tolist() for item in loader] == ITEMS


def test_a_data_set_of_nothing_is_empty(tmp_path: Path) -> None:
    assert lists(MMapIndexedDataset(build(tmp_path, items=[]))) == []
    assert lists(MMapIndexedDataset(build(tmp_path, items=[[], []]))) == [[], []]


# ---- files that are not what they should be ------------------------------------------


def spoiled(prefix: str, index: bytes | None = None, data: bytes | None = None) -> str:
    if index is not None:
        Path(prefix + ".idx").write_bytes(index)
    if data is not None:
        Path(prefix + ".bin").write_bytes(data)
    return prefix


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (b"", "doesn't match expected format.* 0 bytes, less than its header"),
        (b"TNTIDX\0\0" + bytes(18), r"--dataset-impl is configured.*TNTIDX"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQ", 2, 8, 0), "version 2 .*; expected 1"),
        (mmap_index(11, [], []), "code is 11; expected 1 to 10"),
        (mmap_index(0, [], []), "code is 0; expected 1 to 10"),
        (
            mmap_index(8, [1], [0])[:-1],
            "index of 1 items has 38 bytes, this file has 37",
        ),
        (mmap_index(8, [1], [0]) + b"x", "38 bytes, this file has 39"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 8, 2**63), "it is cut off"),
        (
            mmap_index(8, [9], [0]),
            "item 0 has 9 elements of 2 bytes at offset 0, which",
        ),
        (mmap_index(8, [0, 1], [0, 16]), "item 1 .* beyond the 16 bytes"),
        (mmap_index(8, [-1], [0]), "item 0 has size -1 at offset 0: neither"),
        (mmap_index(8, [1], [-2]), "offset -2: neither"),
        (mmap_index(8, [1], [3]), "begins at byte 3, .* no multiple of the 2"),
        (mmap_index(8, [1], [2**63 - 2]), "beyond the 16 bytes"),
    ],
)
def test_a_bad_index_is_an_error_that_names_it(
    tmp_path: Path, index: bytes, match: str
) -> None:
    prefix = spoiled(build(tmp_path, vocab_size=9), index)
    with pytest.raises(ValueError, match=match) as raised:
        MMapIndexedDataset(prefix)
    assert str(raised.value).startswith(prefix + ".idx: ")


def test_data_that_are_cut_off_are_an_error(tmp_path: Path) -> None:
    prefix = build(tmp_path, vocab_size=9)
    data = Path(prefix + ".bin").read_bytes()
    for n in range(len(data)):
        with pytest.raises(ValueError, match=f"beyond the {n} bytes of the data file"):
            MMapIndexedDataset(spoiled(prefix, data=data[:n]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """Where a data set lies, and its good index."""
    prefix = build(tmp_path_factory.mktemp("whole"))
    return prefix, Path(prefix + ".idx").read_bytes()


@given(data=st.data())
@settings(same_folder, max_examples=300)
def test_no_corruption_of_an_index_does_more_than_raise(
    whole: tuple[str, bytes], data: st.DataObject
) -> None:
    """Whatever the bytes, the data set opens and all its items can be read, or else it
    says in a ValueError what is wrong."""
    prefix, good = whole
    index = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(index) - 1))
        index[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(index))))
    spoiled(prefix, bytes(index[:cut]))
    try:
        dataset = MMapIndexedDataset(prefix)
        read = lists(dataset)
    except ValueError as error:
        message = str(error)
    else:
        message = prefix if len(read) == len(dataset) else "items are missing"
    assert prefix in message


@given(st.binary(max_size=200))
@same_folder
def test_files_of_any_bytes_do_no_more_than_raise(tmp_path: Path, index: bytes) -> None:
    magic = b"MMIDIDX\0\0"
    for head in (b"", magic, magic + struct.pack("<Q", 1)):
        prefix = spoiled(str(tmp_path / "train"), head + index, bytes(64))
        with pytest.raises(ValueError, match=r"train\.idx"):
            lists(make_dataset(prefix, "mmap"))


# ---- writing -------------------------------------------------------------------------


def test_values_that_the_dtype_does_not_hold_are_an_error(tmp_path: Path) -> None:
    builder = make_builder(str(tmp_path / "a.bin"), "mmap", vocab_size=100)
    builder.add_item(torch.tensor([65535]))
    for bad in ([65536], [-1], [0.5]):
        with pytest.raises(
            ValueError, match=r"item 1 of .*a\.bin holds values that uint16"
        ):
            builder.add_item(torch.tensor(bad))
    builder.finalize(str(tmp_path / "a.idx"))
    assert lists(MMapIndexedDataset(str(tmp_path / "a"))) == [[65535]]
    with pytest.raises(ValueError, match="no dtype float32; it has float64, int16"):
        MMapIndexedDatasetBuilder(str(tmp_path / "b.bin"), np.float32)


def test_a_set_that_is_not_finished_leaves_no_file(tmp_path: Path) -> None:
    builder = make_builder(str(tmp_path / "a.bin"), "mmap")
    builder.add_item(torch.tensor([1]))
    assert len(os.listdir(tmp_path)) == 1
    del builder
    assert os.listdir(tmp_path) == []


def test_a_set_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    prefix = build(tmp_path)
    builder = make_builder(prefix + ".bin", "mmap")
    builder.add_item(torch.tensor([1]))
    with pytest.raises(FileNotFoundError):
        builder.finalize(str(tmp_path / "nowhere" / "train.idx"))
    assert lists(MMapIndexedDataset(prefix)) == ITEMS
    assert sorted(os.listdir(tmp_path)) == ["train.bin", "train.idx"]


def test_an_index_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "train.idx").mkdir()
    builder = make_builder(str(tmp_path / "train.bin"), "mmap")
    builder.add_item(torch.tensor([1]))
    with pytest.raises(OSError, match=r"train\.idx"):
        builder.finalize(str(tmp_path / "train.idx"))
    assert os.listdir(tmp_path) == ["train.idx"]


def test_a_full_disk_leaves_the_old_set(tmp_path: Path) -> None:
    """Under a limit on the size of files, which is what a full disk looks like."""
    prefix = build(tmp_path)
    done = run_alone("fairseq.full_disk", prefix)
    assert "OSError" in done.stderr.splitlines()[-1]
    assert lists(MMapIndexedDataset(prefix)) == ITEMS
    assert sorted(os.listdir(tmp_path)) == ["train.bin", "train.idx"]


@pytest.mark.parametrize("at", [".bin", ".idx"])
def test_a_process_killed_while_it_renames_leaves_no_mixture(
    tmp_path: Path, at: str
) -> None:
    prefix = build(tmp_path)
    done = run_alone("fairseq.killed_between_renames", prefix, at)
    assert done.returncode == 9
    assert not MMapIndexedDataset.exists(prefix)
    assert lists(MMapIndexedDataset(build(tmp_path))) == ITEMS


def test_data_sets_are_appended(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    prefix, other = build(tmp_path), build(tmp_path / "other")
    builder = make_builder(str(tmp_path / "both.bin"), "mmap")
    builder.add_item(torch.tensor([9]))
    builder.merge_file_(prefix)
    builder.merge_file_(other)
    builder.finalize(str(tmp_path / "both.idx"))
    dataset = make_dataset(str(tmp_path / "both"), "mmap")
    assert lists(dataset) == [[9], *ITEMS, *ITEMS]


def test_data_sets_of_other_dtypes_are_not_appended(tmp_path: Path) -> None:
    prefix = build(tmp_path, vocab_size=9)
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "both.bin"), np.int64)
    with pytest.raises(ValueError, match="has elements of uint16; expected int64"):
        builder.merge_file_(prefix)
    spoiled(prefix, mmap_index(8, [2, 2], [0, 2]))
    narrow = MMapIndexedDatasetBuilder(str(tmp_path / "both.bin"), np.uint16)
    with pytest.raises(ValueError, match="has 16 bytes, its items 8"):
        narrow.merge_file_(prefix)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(None, "uint32"), (65499, "uint16"), (65500, "uint32"), (4294967294, "uint32"),
     (4294967295, "int64")],
)  # fmt: skip
def test_the_vocabulary_chooses_the_dtype(size: int | None, dtype: str) -> None:
    assert np.dtype(best_fitting_int_dtype(size)) == np.dtype(dtype)


# ---- which kind it is ----------------------------------------------------------------


class Letters:
    def encode_line(self, line: str, **options: bool) -> Any:
        assert options["add_if_not_exist"] is False
        codes = [ord(c) for c in line.strip()] + [0] * options["append_eos"]
        return torch.tensor(codes[:: -1 if options["reverse_order"] else 1])


def test_text_is_encoded_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("ab\nc\n")
    dataset = make_dataset(str(path), "raw", dictionary=Letters())
    assert isinstance(dataset, IndexedRawTextDataset)
    assert lists(dataset) == [[97, 98, 0], [99, 0]]
    assert (dataset.get_original_text(1), dataset.size(0)) == ("c", 3)
    assert dataset.sizes.tolist() == [3, 2]
    plain = IndexedRawTextDataset(str(path), Letters(), False, reverse_order=True)
    assert lists(plain) == [[98, 97], [99]]
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(ValueError, match="needs a dictionary"):
        make_dataset(str(path), "raw")


def test_the_kind_is_read_off_the_files(tmp_path: Path) -> None:
    prefix = build(tmp_path)
    assert infer_dataset_impl(prefix) == "mmap"
    assert infer_dataset_impl(spoiled(prefix, b"TNTIDX\0\0")) == "cached"
    assert infer_dataset_impl(spoiled(prefix, b"HUFFIDX\0\0")) == "huffman"
    assert infer_dataset_impl(spoiled(prefix, b"something")) is None
    assert infer_dataset_impl(str(tmp_path / "none")) is None
    (tmp_path / "dna.fasta").touch()
    assert infer_dataset_impl(str(tmp_path / "dna")) == "fasta"
    (tmp_path / "text").touch()
    assert infer_dataset_impl(str(tmp_path / "text")) == "raw"


def test_make_dataset_opens_what_there_is(tmp_path: Path) -> None:
    prefix = build(tmp_path)
    assert type(make_dataset(prefix, "mmap")) is MMapIndexedDataset
    for impl in get_available_dataset_impl():
        assert make_dataset(str(tmp_path / "none"), impl) is None
        assert not dataset_exists(str(tmp_path / "none"), impl)


@pytest.mark.parametrize("impl", ["huffman", "fasta", "lazy", "cached"])
def test_kinds_that_are_not_read_are_rejected_with_the_reason(impl: str) -> None:
    with pytest.raises(
        ValueError, match=f"kind '{impl}' cannot be read: .*--dataset-impl"
    ):
        make_dataset("any", impl)
    with pytest.raises(ValueError, match="choose mmap"):
        make_builder("any.bin", impl)
