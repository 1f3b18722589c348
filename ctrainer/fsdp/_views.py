"""A shard by the parameters that lie in it, for optimizers that tell them apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.fsdp._layout import Group, part_of, refuse_hooks

Pieces = list[tuple[nn.Parameter, int]]  # a view, and where it begins in the shard


class Views:
    """The views of a shard, whose gradients side by side are its gradient."""

    def __init__(
        self, shard: nn.Parameter, group: Group, communicator: _C.Communicator
    ) -> None:
        self.pieces = _cut(shard, group, communicator)
        self.numel = shard.numel()
        self.shape = shard.shape

    @property
    def grad(self) -> torch.Tensor | None:
        """What the next gradient is added to: that of all views that have one and want
        more, -0 elsewhere; None where none has.

        A view whose gradient was replaced is given its place in the whole again.
        """
        if all(view.grad is None for view, _ in self.pieces):
            return None
        row = self._row()
        for view, begin in self.pieces:
            place = _place(row, view, begin)
            if view.grad is None or not view.requires_grad:
                if view.grad is not None:
                    view.grad = view.grad.clone()
                place.fill_(-0.0)  # which a sum with no gradient is, too
                continue
            if view.grad.data_ptr() != place.data_ptr():
                place.copy_(view.grad)
            view.grad = place
        return row.view(self.shape)

    def receive(self, row: torch.Tensor, missing: list[int]) -> None:
        """Share out a reduced gradient, of which the views `missing` have nothing."""
        flat = row.detach().view(-1)
        for number, (view, begin) in enumerate(self.pieces):
            if view.grad is None and view.requires_grad and number not in missing:
                view.grad = _place(flat, view, begin)

    def _row(self) -> torch.Tensor:
        """What the views' gradients are parts of; a new one where of none."""
        for view, begin in self.pieces:
            grad = view.grad
            base = None if grad is None or grad.numel() == 0 else grad._base
            if grad is None or base is None or base.numel() != self.numel:
                continue
            if base.view(-1)[begin:].data_ptr() == grad.data_ptr():
                return base.view(-1)
        return torch.zeros(
            self.numel, dtype=torch.float32, device=self.pieces[0][0].device
        )

    def follow(self, shard: nn.Parameter) -> None:
        """Be views of another shard: optimizers go on with them."""
        for view, begin in self.pieces:
            view.data = _place(shard.detach().view(-1), view, begin)


def _place(row: torch.Tensor, view: torch.Tensor, begin: int) -> torch.Tensor:
    return row[begin : begin + view.numel()].view(view.shape)


def _cut(shard: Any, group: Group, communicator: _C.Communicator) -> Pieces:
    """A view of every parameter's part in the shard: of one dimension, or its rows.

    One that has nothing on this rank has a view of no elements: all ranks' optimizers
    then have the same parameters.
    """
    flat, offset = shard.detach().view(-1), communicator.rank * shard.numel()
    pieces: Pieces = []
    for entry in group.entries:
        low = min(max(entry.at - offset, 0), shard.numel())
        high = max(low, min(entry.at + entry.numel - offset, shard.numel()))
        values = flat[low:high]
        if shard.dim() > 1:
            values = values.view(-1, *shard.shape[1:])
        view: Any = nn.Parameter(values, requires_grad=group.requires_grad)
        view._is_sharded = True
        refuse_hooks(view)
        view._part = part_of(entry, offset, communicator)
        view._orig_size = entry.param.size()
        pieces.append((view, low))
    return pieces


# ---- who is in the modules' tables


def make(unit: Any) -> None:
    """Give the unit's modules views of its shards for parameters."""
    unit._views = [
        Views(shard, group, unit.communicator)
        for shard, group in zip(unit.sharded_params, unit._groups, strict=True)
    ]
    unit._unit.grad_owners = unit._views
    show_views(unit)


def adopt(unit: Any, copied: list[Views]) -> None:
    """Let the unit have these views, which a copied optimizer has, for its own."""
    each = zip(unit._views, copied, unit.sharded_params, strict=True)
    for own, views, shard in each:
        for (made, _), (view, _) in zip(own.pieces, views.pieces, strict=True):
            view.__dict__.update(made.__dict__)
        views.follow(shard)
    unit._views = unit._unit.grad_owners = copied
    show_views(unit)


def show_views(unit: Any) -> None:
    """Let the unit's modules have the views for parameters, under the first names.

    Attributes stay what forward() computes with: an instance's own come before what
    nn.Module finds in its tables.
    """
    for shard, views in zip(unit.sharded_params, unit._views, strict=True):
        unit._parameters.pop(shard._name, None)
        shard._pieces = views.pieces
    for group, views in zip(unit._groups, unit._views, strict=True):
        for entry, (view, _) in zip(group.entries, views.pieces, strict=True):
            entry.param._sharded_param = view
            for place in entry.places:
                place.module._parameters[place.name] = view


def show_shards(unit: Any) -> None:
    """Let the unit have its shards for parameters, as checkpoints do."""
    for group, shard in zip(unit._groups, unit.sharded_params, strict=True):
        unit._parameters[shard._name] = shard
        for entry in group.entries:
            for place in entry.places:
                place.module._parameters.pop(place.name, None)


def views_shown(unit: Any) -> bool:
    return unit.use_orig_params and not any(
        shard._name in unit._parameters for shard in unit.sharded_params
    )


@contextlib.contextmanager
def shards_shown(units: Iterable[Any]) -> Iterator[None]:
    """Within it, units that have views for parameters have shards."""
    changed = [unit for unit in units if views_shown(unit)]
    for unit in changed:
        show_shards(unit)
    try:
        yield
    finally:
        for unit in changed:
            show_views(unit)


def before_load(unit: Any, *unused: object) -> None:
    """The hook of load_state_dict, which finds shards in states."""
    if views_shown(unit):
        show_shards(unit)


def after_load(unit: Any) -> None:
    """Let the views be those of the shards that the unit has now."""
    for views, shard in zip(unit._views, unit.sharded_params, strict=True):
        views.follow(shard)
    show_views(unit)
