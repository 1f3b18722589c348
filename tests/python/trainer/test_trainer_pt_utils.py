"""ctrainer.trainer_pt_utils: nested batches, against transformers where it is there."""

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrainer import trainer_pt_utils as utils

torch = pytest.importorskip("torch")

Pair = namedtuple("Pair", "left right")


def test_detach_keeps_structure_and_drops_the_graph() -> None:
    leaf = torch.ones(2, requires_grad=True) * 2
    got = utils.nested_detach((leaf, [leaf, None], OrderedDict(a=leaf, b=3)))
    assert type(got[2]) is OrderedDict
    assert got[1][1] is None
    assert got[2]["b"] == 3
    assert not any(t.requires_grad for t in (got[0], got[1][0], got[2]["a"]))
    assert got[0].data_ptr() == leaf.data_ptr()


def test_numpify_turns_bfloat16_into_float32() -> None:
    got = utils.nested_numpify(Pair(torch.ones(2).bfloat16(), {"x": np.zeros(1)}))
    assert isinstance(got, Pair)
    assert got.left.dtype == np.float32
    assert got.right["x"].dtype == np.float64


@pytest.mark.parametrize(
    ("nested", "size"),
    [
        (torch.zeros(3, 2), 3),
        ([None, {"a": "text", "b": np.zeros((4, 1))}], 4),
        ({"a": torch.tensor(1.0), "b": (torch.zeros(5),)}, 5),
        ({"a": 1, "b": None}, None),
        ([], None),
    ],
)
def test_batch_size_is_that_of_the_first_array(nested: Any, size: int | None) -> None:
    assert utils.find_batch_size(nested) == size


def test_batch_size_of_a_mapping_that_is_no_dict() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.zeros(6, 2)})
    assert utils.find_batch_size(batch) == 6


def test_endless_nesting_is_a_recursion_error() -> None:
    nested: list[Any] = []
    nested.append(nested)
    for function in (utils.find_batch_size, utils.nested_detach, utils.nested_numpify):
        with pytest.raises(RecursionError, match="nested batch"):
            function(nested)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=2, max_size=2),
    st.booleans(),
    st.sampled_from([-100, 0]),
)
def test_concat_equals_transformers(
    shapes: list[tuple[int, int]], as_tensor: bool, padding: int
) -> None:
    theirs = pytest.importorskip("transformers.trainer_pt_utils")
    made = [np.arange(a * b, dtype="f4").reshape(a, b) for a, b in shapes]
    first, second = [torch.from_numpy(x) if as_tensor else x for x in made]
    for a, b in (
        ((first, [first[:, 0]]), (second, [second[:, 0]])),
        ({"x": first, "y": first[0, 0]}, {"x": second, "y": second[0, 0]}),
    ):
        if not as_tensor and isinstance(a, dict):
            continue  # transformers rejects NumPy's scalars
        got = utils.nested_numpify(utils.nested_concat(a, b, padding))
        wanted = theirs.nested_concat(a, b, padding)
        keys = a if isinstance(a, dict) else range(2)
        for key in keys:
            x, y = got[key], wanted[key]
            x, y = (x[0], y[0]) if isinstance(x, list) else (x, y)
            np.testing.assert_array_equal(x, np.asarray(y))


def test_concat_of_different_structures_is_rejected() -> None:
    with pytest.raises(TypeError, match="a tuple and a list"):
        utils.nested_concat((np.zeros(1),), [np.zeros(1)])


def test_gather_and_truncate_on_one_rank() -> None:
    tensors = (torch.arange(4), [np.arange(6)])
    assert utils.nested_gather(tensors, None) is tensors
    alone = utils.nested_gather(tensors, "distributed")
    assert alone[0].tolist() == [0, 1, 2, 3]
    assert utils.distributed_concat(tensors, 2)[1][0].tolist() == [0, 1]
    assert utils.distributed_concat(None) is None
    short = utils.nested_truncate(tensors, 2)
    assert short[0].tolist() == [0, 1]
    assert short[1][0].tolist() == [0, 1]
