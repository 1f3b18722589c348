"""The cost model of docs/concepts/scaling.md: formulas by hand, and what must hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from cost import (
    Network,
    Worker,
    all_reduce,
    block_update,
    coded,
    sync_update,
)

NETWORK = Network(rate=1e9, latency=1e-5)


def test_an_all_reduce_is_the_faster_of_ring_and_tree() -> None:
    # 4 workers, long: 6 messages of 1e9 / 4 bytes, 0.25 s each
    assert all_reduce(1e9, 4, NETWORK) == pytest.approx(1.5 + 6e-5)
    # 1024 workers, short: 20 levels of the tree, not 2046 messages
    assert all_reduce(8, 1024, NETWORK) == pytest.approx(20e-5 + 16e-9)
    assert all_reduce(1e9, 1, NETWORK) == 0


def test_codes_have_a_scale_for_each_block() -> None:
    assert [coded(bits) for bits in (32, 16)] == [4.0, 2.0]
    assert coded(8) == 1 + 4 / 256
    assert coded(4, block=64) == 0.5 + 4 / 64


def test_an_exchange_is_hidden_behind_the_backward_pass() -> None:
    worker = Worker(parameters=1e9, compute=3.0, backward=0.5)
    # 2e9 bytes by a ring of 2: 2 messages of 1 s
    assert sync_update(worker, 2, NETWORK) == pytest.approx(3.0 + 2 + 2e-5 - 1.5)
    small = Worker(parameters=1e8, compute=3.0)
    assert sync_update(small, 2, NETWORK) == 3.0


def test_a_block_shares_its_exchange_and_passes_among_its_updates() -> None:
    worker = Worker(parameters=1e9, compute=3.0, memory=24e9)
    # 4e9 bytes by a ring of 2: 4 s, and 24e9 bytes of passes: 1 s
    expected = 3.0 + (4 + 2e-5 + 1) / 10
    assert block_update(worker, 2, NETWORK, every=10) == pytest.approx(expected)
    hidden = block_update(worker, 2, NETWORK, every=10, overlapped=2)
    assert hidden == pytest.approx(3.0 + 1 / 10)
    assert block_update(worker, 1, NETWORK, every=10) == 3.0
