"""Which parts of which parameters an optimizer of a sharded module has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ctrainer.fsdp import _full, _metadata


@dataclass(frozen=True)
class Held:
    """A parameter that an optimizer has, and the whole ones of which it has parts."""

    param: Any
    names: list[str]  # of whole parameters, the first name of tied ones
    unit: Any = None  # None: it is whole itself
    entries: tuple[Any, ...] = ()
    begin: int = 0  # in the group, of this rank's first element

    def cut(self, entry: Any) -> tuple[slice, slice]:
        """Which elements of param are which of the whole parameter."""
        low = max(self.begin, entry.at)
        high = max(low, min(self.begin + self.param.numel(), entry.at + entry.numel))
        own = slice(low - self.begin, high - self.begin)
        return own, slice(low - entry.at, high - entry.at)


@dataclass(frozen=True)
class Row:
    """A shard: one parameter of an optimizer, or with use_orig_params several."""

    held: list[Held]
    unit: Any
    group: Any
    numel: int


def rows_of(model: nn.Module) -> list[Row]:
    """Units in the order of modules()."""
    names = _full.names_of(model)
    rows = []
    for unit in _full.units_of(model):
        for i, (_, group, shard) in enumerate(_full.groups_of([unit])):
            first = unit.rank * shard.numel()
            firsts = [names[id(entry.param)][0] for entry in group.entries]
            held = [Held(shard, firsts, unit, tuple(group.entries), first)]
            if unit.use_orig_params:
                held = [
                    Held(view, [name], unit, (entry,), first + begin)
                    for name, entry, (view, begin) in zip(
                        firsts, group.entries, unit._views[i].pieces, strict=True
                    )
                ]
            rows.append(Row(held, unit, group, shard.numel()))
    return rows


def held_in(model: nn.Module) -> list[Held]:
    """What parameters() yields: of units, and then what no unit has."""
    held = [one for row in rows_of(model) for one in row.held]
    return held + whole_in(model, held)


def whole_in(model: nn.Module, held: list[Held]) -> list[Held]:
    sharded = {id(one.param) for one in held}
    return [
        Held(param, [_metadata.original_name(name)])
        for name, param in model.named_parameters()
        if id(param) not in sharded
    ]
