"""Sharded training of trees and options that Hypothesis draws, as in one process.

CTRAINER_EXAMPLES=1000 searches on with new examples of every number of ranks; a failure
is shrunk and printed.
"""

from __future__ import annotations

import copy
import os

import fsdp_trees as trees
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from rank_threads import on_ranks

from ctrainer import _C

WANTED = int(os.environ.get("CTRAINER_EXAMPLES", "0"))
SEARCHES = settings(
    max_examples=WANTED or 4,
    derandomize=not WANTED,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def bounds(case: trees.Case) -> tuple[float, float]:
    """Of losses and norms, relative; of parameters, absolute.

    In float32 a few roundings of values below 4, of sums that are added in another
    order. In bfloat16 of 8 bits: 20 updates, each of at most 0.01, that a few roundings
    of gradients make wrong by 2**-4 at most.
    """
    if case.dtype == torch.float32:
        return 2e-5, 2e-5
    return 2**-4, 20 * 1e-2 * 2**-4


def compare(found: trees.Trained, expected: trees.Trained, case: trees.Case) -> None:
    relative, absolute = bounds(case)
    assert found.losses == pytest.approx(expected.losses, rel=relative)
    assert found.norms == pytest.approx(expected.norms, rel=relative)
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        assert (found.values[name] - value).abs().max() < absolute, name


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_tree_trains_like_one_process(world: int) -> None:
    @SEARCHES
    @given(trees.trees(), trees.cases(world))
    def search(layers: tuple[trees.Layer, ...], case: trees.Case) -> None:
        plain = trees.whole(layers)
        copies = [copy.deepcopy(plain) for _ in range(world)]
        expected = trees.in_one_process(plain, case, world)

        def train(group: _C.Communicator) -> None:
            model = trees.sharded(copies[group.rank], case, group)
            found = trees.on_a_rank(model, case, group)
            compare(found, expected[group.rank], case)

        on_ranks(world, train)

    search()
