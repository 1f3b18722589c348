"""The checksum of a batch, against one that Python works out."""

from __future__ import annotations

import collections
import copy
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from draws import draws

from ctrainer import _C
from ctrainer.adapters.reading import batch_digest

MOST_PARTS, MOST_BYTES = 8, 1 << 14
DTYPES = ["float32", "float64", "float16", "int64", "int32", "int16", "uint8", "bool"]


def expected(parts: list[Any]) -> int:
    crc = 0
    for part in parts[:MOST_PARTS]:
        if isinstance(part, torch.Tensor):
            part = part.detach().numpy()
        if isinstance(part, float):
            part = struct.pack("=d", part)
        elif isinstance(part, int):
            part = struct.pack("=q", part)
        data = part.encode() if isinstance(part, str) else memoryview(part).tobytes()
        crc = zlib.crc32(struct.pack("=Q", len(data)), crc)
        crc = zlib.crc32(data[:MOST_BYTES], crc)
    return crc


def leaf(rng: np.random.Generator) -> Any:
    kind = rng.integers(6)
    if kind < 4:
        shape = rng.integers(0, 5, size=rng.integers(4))
        if rng.random() < 0.1:
            shape = np.array([5000])
        array = rng.integers(0, 100, shape).astype(DTYPES[rng.integers(len(DTYPES))])
        return torch.from_numpy(array) if kind % 2 else array
    return [7, "text", 2.5][rng.integers(3)]


def batch_of(rng: np.random.Generator, parts: list[Any], depth: int = 0) -> Any:
    """A batch drawn at random, whose parts are added in their order."""
    if depth == 3 or rng.random() < 0.3 * depth:
        parts.append(leaf(rng))
        return parts[-1]
    inner = [batch_of(rng, parts, depth + 1) for _ in range(rng.integers(1, 4))]
    named = {f"name{i}": part for i, part in enumerate(inner)}
    kinds = [inner, tuple(inner), named, collections.UserDict(named), (None, inner)]
    return kinds[rng.integers(len(kinds))]


@pytest.mark.parametrize("seed", range(draws(60, 3000)))
def test_any_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts: list[Any] = []
    batch = batch_of(rng, parts)
    assert batch_digest(batch) == expected(parts)
    assert batch_digest(copy.deepcopy(batch)) == expected(parts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(3, 4).T, torch.zeros(3, 4).T),
        (torch.ones(8)[::2], torch.zeros(8)[::2]),
        (np.asfortranarray(np.eye(3)), np.asfortranarray(np.ones((3, 3)))),
        (np.array([1], ">i4"), np.array([2], ">i4")),
        (np.array([1], np.uint16), np.array([2], np.uint16)),
        (np.float32(1), np.float32(2)),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.ones(2, dtype=torch.uint16), torch.zeros(2, dtype=torch.uint16)),
        (torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)),
        (torch.ones(2, device="meta"), torch.ones(3, device="meta")),
        (float("nan"), 1.0),
        (1 << 20000, (1 << 20000) + 1),
        ("a", "ä"),
        (True, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_memory_counts_too(one: Any, other: Any) -> None:
    assert batch_digest([one]) == batch_digest([copy.deepcopy(one)])
    assert batch_digest([one]) != batch_digest([other])


def test_of_a_large_part_the_beginning_counts() -> None:
    large = torch.zeros(100, 1000)
    digest = batch_digest(large)
    large[99, 999] = 1
    assert batch_digest(large) == digest
    large[0, 999] = 1
    assert batch_digest(large) != digest


def test_parts_of_no_known_kind_are_passed_over() -> None:
    class Shapeless:
        pass

    class Broken:
        @property
        def shape(self) -> Any:
            raise OSError("no file")

    assert batch_digest([Shapeless(), 3]) == expected([3])
    assert batch_digest([Broken(), 3]) == expected([b"Broken", 3])


def test_a_batch_may_hold_itself() -> None:
    batch: list[Any] = [3]
    batch.append(batch)
    assert batch_digest(batch) == expected([3] * MOST_PARTS)
    empty: dict[str, Any] = {}
    empty["all"] = empty
    assert batch_digest(empty) == 0


def test_a_list_may_shrink_while_it_is_read() -> None:
    batch: list[Any] = [object(), object(), 3]

    def describe(part: Any) -> None:
        batch.clear()

    assert _C.batch_digest(batch, describe) == 0


def test_an_exception_of_the_description_is_passed_on() -> None:
    def describe(part: Any) -> None:
        raise KeyError("part")

    with pytest.raises(KeyError, match="part"):
        _C.batch_digest([object()], describe)
    with pytest.raises(TypeError):
        _C.batch_digest([])  # type: ignore[call-arg]
