"""Scenarios of sharded modules in a group of machines of two ranks each."""

from __future__ import annotations

from typing import Any

import fsdp_scenarios as units
from fsdp_prefetch_scenarios import TRAINED

from ctrainer import _C


def machines(group: Any, local: int = 2) -> Any:
    """The ranks of the group, `local` of them on a machine."""
    within, between = (
        group.split(group.rank // local),
        group.split(group.rank % local),
    )
    return _C.hierarchical_communicator(within, between, group.split(0))


def scenario_what_trains_without_secondary_shards_trains_with_them(group: Any) -> None:
    over = machines(group)
    units.EVERYWHERE.update(secondary_shards=2)
    try:
        for scenario in TRAINED:
            scenario(over)
    finally:
        units.EVERYWHERE.clear()
