"""Ranks of two machines that a link joins."""

from __future__ import annotations

from pathlib import Path

import networks
import pytest


def test_ranks_in_two_networks_make_one_group(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    networks.need()
    found = networks.told(tmp_path, "comm.networks", 50)
    for rank, (*told, seconds) in enumerate(found):
        assert told == ["hierarchical", rank, 4, True, [10.0, 11.0, 12.0, 13.0]]
        # Half of 2 MB crosses from each of a machine's ranks: 16 Mbit, 0.32 seconds.
        assert seconds > 0.25 or not networks.is_limited(tmp_path)
