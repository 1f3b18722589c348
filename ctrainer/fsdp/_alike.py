"""Whether all ranks have sharded the same module: compared once, before its first
forward. Ranks that differ would mix up their data, or wait for each other."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from ctrainer import _C
from ctrainer.fsdp import _metadata

Made = list[list[str]]  # of every unit, as _described() says

_OPTIONS = (
    "compute_dtype",
    "fp32_reduce_scatter",
    "gather_bits",
    "reduce_bits",
    "reshard_after_forward",
    "forward_prefetch",
    "backward_prefetch",
)  # that decide which collectives there are, and of what


def compare(root: Any, units: list[Any]) -> None:
    """Raise ValueError on all ranks, naming rank and unit, where they differ.

    Of the units those in the root's groups are compared. Collective, of 8 bytes.
    """
    groups = [root.communicator, *([root.replicas] if root.replicas else [])]
    same = [unit for unit in units if unit.communicator is root.communicator]
    if not any(unit._groups for unit in same):
        return
    made = [_described(unit) for unit in same]
    differs = [
        group for group in groups if group.world_size > 1 and _differs(group, made)
    ]
    for group in differs:
        _tell(group, made)


def _described(unit: Any) -> list[str]:
    """The unit's name, and what has to be alike of it."""
    params = "; ".join(
        f"{_metadata.original_name(part.places[0].path)} {tuple(part.param.shape)}"
        + ("" if group.requires_grad else " frozen")
        for group in unit._groups
        for part in group.entries
    )
    return [
        f"the unit {unit._unit.path!r}" if unit._unit.path else "the root",
        f"the parameters {params}" if params else "no parameters",
        f"rows of {[group.size for group in unit._groups]} elements",
        *(f"{option}={getattr(unit, option)}" for option in _OPTIONS),
    ]


def _differs(group: _C.Communicator, made: Made) -> bool:
    digest = hashlib.sha256(json.dumps(made).encode()).digest()[:8]
    word = int.from_bytes(digest, "little", signed=True)
    own = torch.tensor([word], device="cpu")
    every = torch.empty(group.world_size, dtype=own.dtype, device="cpu")
    group.all_gather(every, own)
    return bool((every != own).any())


def _tell(group: _C.Communicator, made: Made) -> None:
    answers = group.gather_bytes(json.dumps(made).encode())
    told: list[Made] = [json.loads(answer) for answer in answers]
    most = max(told, key=told.count)
    usual, count = told.index(most), told.count(most)
    other = next(rank for rank, made in enumerate(told) if made != most)
    theirs, ours = _first_difference(told[other], most)
    raise ValueError(
        f"ranks have sharded different modules: rank {other} has {theirs}, and rank "
        f"{usual} {ours}; {count} of {len(told)} ranks are with rank {usual}. All "
        "ranks have to build the same module and to wrap it alike: look for what goes "
        "by the rank in the model's configuration, its wrapping and what is frozen"
    )


def _first_difference(a: Made, b: Made) -> tuple[str, str]:
    for one, two in zip(a, b, strict=False):
        for x, y in zip(one, two, strict=True):
            if x != y:
                return _with(one, x), _with(two, y)
    first, second = (
        _with(more[len(few)], more[len(few)][1])
        if len(more) > len(few)
        else f"{len(more)} units"
        for more, few in ((a, b), (b, a))
    )
    return first, second


def _with(unit: list[str], what: str) -> str:
    return f"{unit[0]} with {unit[1] if what == unit[0] else what}"
