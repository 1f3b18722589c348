"""Two ranks against fairscale's own wrappers over gloo, on the same batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from ranks import run, told

SPEC = importlib.util.find_spec("fairscale")
pytestmark = pytest.mark.skipif(SPEC is None, reason="fairscale is not installed")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    assert SPEC is not None
    assert SPEC.origin is not None
    folder = str(Path(SPEC.origin).parent.parent)
    own = tmp_path_factory.mktemp("fairscale")
    return told(run(own, "parity.fairscale", fairscale=folder))


@pytest.mark.parametrize("size", [0, 2**23])
def test_sharded_gradients_train_to_the_same_bits(
    found: list[dict[str, Any]], size: int
) -> None:
    for here in found:
        assert here[f"tensors {size}"] == [True] * 9
        assert here[f"states {size}"] == [True] * 8


def test_ranks_keep_the_same_gradients(found: list[dict[str, Any]]) -> None:
    for here in found:
        ours, theirs = here["kept 0"]
        assert ours == theirs
    assert found[0]["kept 0"] != found[1]["kept 0"]


def test_shards_and_what_is_told_of_them_are_the_same(
    found: list[dict[str, Any]],
) -> None:
    """Values, metadata and names; each puts the other's shards together."""
    for here in found:
        assert here["shards"] == [True] * 20


def test_sharded_parameters_train_alike(found: list[dict[str, Any]]) -> None:
    """Apart by a few roundings of parameters of at most 1, over 16 updates: ours adds
    the ranks' gradients before it divides them, fairscale divides on both sides."""
    for here in found:
        ours, theirs = here["names"]
        assert ours == theirs
        assert here["apart"] < 16 * 4 * 2**-24
