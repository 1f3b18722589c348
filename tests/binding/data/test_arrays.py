"""ctrainer._C.ArrayAccumulator against NumPy."""

import gc
import sys
import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrainer._C import ArrayAccumulator

torch = pytest.importorskip("torch")

DTYPES = ["float32", "float64", "float16", "int64", "int32", "int8", "bool"]


def oracle(arrays: list[np.ndarray], padding: int) -> np.ndarray:
    """Rows below one another, those too short filled on the right."""
    arrays = [np.atleast_1d(a) for a in arrays]
    if arrays[0].ndim == 1:
        return np.concatenate(arrays)
    n, width = sum(a.shape[0] for a in arrays), max(a.shape[1] for a in arrays)
    out = np.full((n, width, *arrays[0].shape[2:]), padding).astype(arrays[0].dtype)
    row = 0
    for a in arrays:
        out[row : row + a.shape[0], : a.shape[1]] = a
        row += a.shape[0]
    return out


def collect(batches: list[Any], *args: Any, **kwargs: Any) -> Any:
    accumulator = ArrayAccumulator(*args, **kwargs)
    for batch in batches:
        accumulator.append(batch)
    return accumulator.result()


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def numbers(shape: tuple[int, ...], dtype: str, start: int) -> np.ndarray:
    return (
        (np.arange(start, start + int(np.prod(shape))) % 97)
        .reshape(shape)
        .astype(dtype)
    )


@settings(deadline=None, max_examples=300)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1),
    tail=st.lists(st.integers(0, 3), max_size=2),
    dims=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    padding=st.sampled_from([-100, 0, 7]),
    hint=st.one_of(st.none(), st.integers(0, 200)),
    as_tensor=st.booleans(),
)
def test_ragged_batches_equal_the_oracle(
    sizes: list[tuple[int, int]],
    tail: list[int],
    dims: int,
    dtype: str,
    padding: int,
    hint: int | None,
    as_tensor: bool,
) -> None:
    shapes = [(n, w, *tail)[: dims + len(tail)] if dims > 1 else (n,) for n, w in sizes]
    arrays = [numbers(s, dtype, 10 * i) for i, s in enumerate(shapes)]
    batches = [torch.from_numpy(a) for a in arrays] if as_tensor else arrays
    assert equal(collect(batches, hint, padding), oracle(arrays, padding))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=8)
)
def test_structures_survive(sizes: list[tuple[int, int]]) -> None:
    Pair = namedtuple("Pair", "left right")
    arrays = [numbers(s, "float32", 0) for s in sizes]
    batches = [
        Pair([torch.from_numpy(a), None], OrderedDict(x=a[:, 0], y=({"z": a},)))
        for a in arrays
    ]
    got = collect(batches)
    whole = oracle(arrays, -100)
    assert isinstance(got, Pair)
    assert isinstance(got.left, list)
    assert got.left[1] is None
    assert isinstance(got.right, OrderedDict)
    assert equal(got.left[0], whole)
    assert equal(got.right["x"], np.concatenate([a[:, 0] for a in arrays]))
    assert equal(got.right["y"][0]["z"], whole)


def test_values_without_dimensions_are_rows() -> None:
    assert equal(
        collect([torch.tensor(1.5), torch.tensor(2.5)]), np.float32([1.5, 2.5])
    )
    assert equal(collect([1.5, 2.5]), np.float64([1.5, 2.5]))
    assert equal(collect([np.int32(3), np.int32(4)]), np.int32([3, 4]))


def test_bfloat16_becomes_float32() -> None:
    batches = [torch.randn(3, 4).bfloat16() for _ in range(3)]
    assert equal(collect(batches), torch.cat(batches).float().numpy())


def test_gradients_strides_and_views_do_not_matter() -> None:
    whole = torch.randn(6, 8, 5, requires_grad=True)
    got = collect([whole[:2].transpose(1, 2), whole[2:].transpose(1, 2)])
    assert equal(got, whole.detach().transpose(1, 2).numpy())
    assert equal(
        collect([whole.detach().numpy()[:, ::2]]), whole.detach().numpy()[:, ::2]
    )


def test_no_batch_gives_none_and_a_result_starts_afresh() -> None:
    accumulator = ArrayAccumulator()
    assert accumulator.result() is None
    accumulator.append(np.ones(3))
    first = accumulator.result()
    assert accumulator.result() is None
    accumulator.append({"other": np.zeros(2)})
    assert equal(first, np.ones(3))
    assert equal(accumulator.result()["other"], np.zeros(2))


def test_result_is_writable_and_outlives_the_accumulator() -> None:
    array = collect([np.zeros((2, 3)), np.zeros((2, 5))])
    gc.collect()
    array[:] = 4.0
    assert array.flags.c_contiguous
    assert array.sum() == 4.0 * 20


def n_rows(nested: Any) -> int:
    while not isinstance(nested, np.ndarray | torch.Tensor):
        nested = nested["a"] if isinstance(nested, dict) else nested[-1]
    return nested.shape[0]


@pytest.mark.parametrize(
    ("first", "second", "error", "text"),
    [
        (np.zeros((2, 3)), np.zeros((2, 3, 1)), ValueError, r"^batch: .*3 dimensions"),
        (np.zeros((2, 3, 4)), np.zeros((2, 3, 5)), ValueError, "dimension 2 is 5"),
        (np.zeros(2, "f4"), np.zeros(2, "f8"), TypeError, "float64.*float32"),
        ({"a": np.zeros(1)}, {"b": np.zeros(1)}, ValueError, "lacks the key 'a'"),
        ((np.zeros(1),), [np.zeros(1)], TypeError, "a list where.* a tuple of 1"),
        ((np.zeros(1),), (np.zeros(1),) * 2, TypeError, "a tuple of 1"),
        ((None, np.zeros(1)), (np.zeros(1),) * 2, TypeError, r"batch\[0\]: None"),
        (
            {"a": [np.zeros(1), torch.zeros(1, 2)]},
            {"a": [np.zeros(1), torch.zeros(1)]},
            ValueError,
            r"batch\['a'\]\[1\]: .*1 dimensions",
        ),
    ],
)
def test_batch_that_does_not_fit_is_named_and_not_added(
    first: Any, second: Any, error: type[Exception], text: str
) -> None:
    accumulator = ArrayAccumulator()
    accumulator.append(first)
    with pytest.raises(error, match=text):
        accumulator.append(second)
    accumulator.append(first)
    assert n_rows(accumulator.result()) == 2 * n_rows(first)


@pytest.mark.parametrize("value", ["text", object(), np.array(["a"]), b"bytes"])
def test_value_that_is_no_array_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"logits\['x'\]: .*ignore_keys"):
        ArrayAccumulator(name="logits").append({"x": value})


@pytest.mark.parametrize("kwargs", [{"n_rows_hint": -1}, {"spill_bytes": 0}])
def test_bad_count_names_the_argument(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        ArrayAccumulator(**kwargs)


def test_more_rows_than_memory_are_announced() -> None:
    accumulator = ArrayAccumulator(n_rows_hint=2**40, name="predictions")
    with pytest.warns(UserWarning, match=r"predictions: 1099511627776 rows.*MiB"):
        accumulator.append(np.zeros((2, 64)))
    assert accumulator.result().shape == (2, 64)


def test_large_arrays_go_to_a_file(tmp_path: Path) -> None:
    batches = [np.full((100, 20 + i), float(i)) for i in range(20)]
    got = collect(batches, spill_bytes=1 << 16, spill_folder=str(tmp_path))
    assert equal(got, oracle(batches, -100))
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_missing_spill_folder_is_an_os_error(tmp_path: Path) -> None:
    accumulator = ArrayAccumulator(spill_bytes=8, spill_folder=tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="none"):
        accumulator.append(np.zeros(100))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("hint", [None, 512])
@pytest.mark.parametrize("ragged", [False, True])
def test_memory_is_that_of_the_result(hint: int | None, ragged: bool) -> None:
    widths = [1024 + (32 * i if ragged else 0) for i in range(64)]
    batch = np.ones((8, max(widths), 8), "f4")
    accumulator = ArrayAccumulator(hint)
    gc.collect()
    before = resident_bytes()
    peak = 0
    for width in widths:
        accumulator.append(batch[:, :width])
        peak = max(peak, resident_bytes() - before)
    array = accumulator.result()
    peak = max(peak, resident_bytes() - before)
    # ascontiguousarray copies one ragged batch; huge pages round up, twice 2 MiB.
    assert peak <= array.nbytes + batch.nbytes + (4 << 20)
    assert array.shape == (512, max(widths), 8)


def test_two_threads_cannot_use_the_same_rows() -> None:
    accumulator = ArrayAccumulator()
    batch = np.ones((64, 1 << 14))
    errors: list[BaseException] = []

    def work() -> None:
        for _ in range(8):
            try:
                accumulator.append(batch)
            except RuntimeError as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another thread" in str(e) for e in errors)
    assert accumulator.result().shape == ((24 - len(errors)) * 64, 1 << 14)


def test_no_leaks() -> None:
    tensor, array = torch.ones(2, 3), np.ones((2, 4))

    def exercise() -> None:
        accumulator = ArrayAccumulator(4, name="leaky")
        accumulator.append((tensor, {"a": array}))
        accumulator.append((tensor[:, :1], {"a": array}))
        with pytest.raises(TypeError):
            accumulator.append((tensor, {"a": "text"}))
        accumulator.result()
        accumulator.append(array)

    def growth() -> int:
        """Of memory blocks, in 100 rounds."""
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(100):
            exercise()
        gc.collect()
        return sys.getallocatedblocks() - before

    exercise()
    gc.collect()
    counts = sys.getrefcount(ArrayAccumulator), sys.getrefcount(array)
    # torch and NumPy fill caches now and then; what leaks does so in every window.
    assert min(growth() for _ in range(8)) < 50
    assert (sys.getrefcount(ArrayAccumulator), sys.getrefcount(array)) == counts


def test_survives_every_failed_allocation() -> None:
    testcapi = pytest.importorskip("_testcapi")
    array, other = np.ones((2, 3)), np.ones((2, 4))
    for start in range(400):
        result = None
        testcapi.set_nomemory(start)
        try:
            accumulator = ArrayAccumulator()
            accumulator.append({"a": array})
            accumulator.append({"a": other})
            result = accumulator.result()
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        if result is not None:
            break
    assert equal(result["a"], oracle([array, other], -100))
