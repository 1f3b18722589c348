"""Parameters that are frozen, or trained again, after their module was wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ctrainer.fsdp._layout import Entry, Group


def _held(unit: Any) -> Iterator[tuple[Group, Entry, Any]]:
    """Each parameter, and what optimizers have of it: a view, or its group's shard."""
    for number, (group, shard) in enumerate(
        zip(unit._groups, unit.sharded_params, strict=True)
    ):
        views = unit._views[number].pieces if unit.use_orig_params else ()
        for place, entry in enumerate(group.entries):
            yield group, entry, views[place][0] if views else shard


def watched(unit: Any) -> tuple[Any, ...]:
    """What the engine compares before a forward: what optimizers have of a parameter
    and itself, those that were wrapped as trained ones first."""
    trained: list[Any] = []
    frozen: list[Any] = []
    for group, entry, held in _held(unit):
        (trained if group.requires_grad else frozen).extend((held, entry.param))
    return (*trained, *frozen)


def settle(unit: Any) -> tuple[bool, ...]:
    """Which of the parameters that were wrapped as trained ones are frozen now, on both
    sides: the one that has changed tells.

    Raises RuntimeError for a parameter that was wrapped frozen and is to be trained,
    and for a part of a flat parameter.
    """
    found = []
    for group, entry, held in _held(unit):
        own, shown = entry.param.requires_grad, held.requires_grad
        path = entry.places[0].path
        if not group.requires_grad:
            if own or shown:
                raise RuntimeError(
                    f"{path} requires a gradient, and was frozen when it was wrapped: "
                    "there is no room for one. Wrap it while it requires gradients, "
                    "and freeze it after that"
                )
            continue
        trains = shown if shown != entry.trains else own
        if trains != shown and not unit.use_orig_params and len(group.entries) > 1:
            raise RuntimeError(
                f"{path}.requires_grad is {own}, and it is part of a flat parameter, "
                f"whose requires_grad is {shown}: wrap with use_orig_params=True, "
                "which has a parameter for each, or flatten_parameters=False"
            )
        entry.trains = trains
        entry.param.requires_grad_(trains)
        held.requires_grad_(trains)
        found.append(not trains)
    return tuple(found)
