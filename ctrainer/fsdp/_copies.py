"""Copies of sharded modules."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from ctrainer.fsdp import _frozen, _views

M = TypeVar("M")


@contextlib.contextmanager
def _without_memory(unit: Any) -> Iterator[None]:
    """Within it full parameters have their shapes, and one element for all places."""
    own = [entry.param for group in unit._groups for entry in group.entries]
    homes = [(p, p.data) for p in [*own, *(p for _, p in unit.borrowed)]]
    for param, home in homes:
        one = torch.zeros((), dtype=home.dtype, device=home.device)
        param.data = one.expand(home.shape)
    try:
        yield
    finally:
        for param, home in homes:
            param.data = home


# Attributes that a copy makes anew: its engine, and those that it borrows from.
_OF_THE_ENGINE = {"_unit", "_lenders"}


def deep_copy(unit: M, memo: dict[int, Any]) -> M:
    """A copy of a unit and of all below it.

    Raises ValueError in the middle of a forward or backward.
    """
    source: Any = unit
    source._assert_idle()
    made: Any = object.__new__(type(source))
    memo[id(source)] = made
    for shared in (source.communicator, source.replicas, source.home):
        memo[id(shared)] = shared
    if "_lenders" in source.__dict__:
        made.__dict__["_lenders"] = None
    with _without_memory(source):
        for name, value in source.__dict__.items():
            if name not in _OF_THE_ENGINE:
                made.__dict__[name] = copy.deepcopy(value, memo)
    _settle(made, source)
    return made  # type: ignore[no-any-return]


def _settle(made: Any, source: Any) -> None:
    """Give the copy an engine like its source's."""
    for shard, group in zip(made.sharded_params, made._groups, strict=True):
        made._sharding.mark(shard, group)
    views = made.__dict__.get("_views")
    made._share_out()
    if views is not None:
        _views.adopt(made, views)
        made._watched = _frozen.watched(made)
    made._unit.divide_factors = source._unit.divide_factors
    made._unit.require_sync = source._unit.require_sync
    if made._unit.residual is not None:
        memoryview(made._unit.residual)[:] = memoryview(source._unit.residual)
    made._reset_lazy_init()
