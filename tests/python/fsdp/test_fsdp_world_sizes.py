"""Sharded runs that go on with another number of ranks, bit for bit.

Of 1 to 4 ranks each, that share memory; two of them over gloo, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_trees as trees
import fsdp_world_sizes as sizes
import pytest
import ranks
from rank_threads import on_ranks

from ctrainer import _C

Digests = list[str]


def on_threads(world: int, work: Callable[..., Digests], *given: Any) -> Digests:
    """work(group, module, ...) on each rank; all have to come to the same."""
    plain = trees.whole(sizes.LAYERS)
    copies = [copy.deepcopy(plain) for _ in range(world)]

    def run(group: _C.Communicator) -> Digests:
        return work(group, copies[group.rank], *given)

    found = on_ranks(world, run)
    assert found == [found[0]] * world
    return found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sizes")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[tuple[str, int], Digests]:
    """By the layout and the number of ranks that saved, whose files are there then."""
    return {
        (layout, old): on_threads(old, sizes.save, layout, folder)
        for layout in sizes.LAYOUTS
        for old in sizes.SIZES
    }


@pytest.mark.parametrize("layout", sizes.LAYOUTS)
@pytest.mark.parametrize("old", sizes.SIZES)
def test_any_other_number_of_ranks_goes_on_with_the_same_bits(
    folder: Path, saved: dict[tuple[str, int], Digests], layout: str, old: int
) -> None:
    """By shards where files can be made of files; by full states, one other number."""
    expected = saved[layout, old]
    for new in sizes.SIZES:
        if new != old and sizes.by_shards(layout):
            sizes.reshard(folder, layout, old, new)
        ways = ["shards"] if new == old or sizes.by_shards(layout) else []
        ways += ["full"] if new == old % 4 + 1 or not ways else []
        found = [
            on_threads(new, sizes.resume, layout, folder, old, way) for way in ways
        ]
        assert found == [found[0]] * len(ways)
        assert found[0][0] == expected[0]
        assert found[0][1] != expected[0]
        if new == old:
            assert found[0] == expected


def test_gloo_and_shared_memory_go_on_with_what_the_other_saved(
    folder: Path, saved: dict[tuple[str, int], Digests]
) -> None:
    own = folder / "run"
    first, second = ranks.told(ranks.run(own, "fsdp.world_sizes"))
    assert first == second
    for (layout, old), digests in saved.items():
        assert first[layout][str(old)][0] == digests[0]
        found = on_threads(old, sizes.resume, layout, own, 2, "full")
        assert found[0] == first[layout]["saved"][0]
        if old == 2:  # the sum of two does not depend on who adds them
            assert found == first[layout]["saved"] == digests == first[layout]["2"]
