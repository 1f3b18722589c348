"""How a module's parameters become groups of flat parameters, what of them is on this
rank, and how a shard is seen: by parameter, and where parameters are frozen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.dlpack import from_dlpack

from ctrainer import _C

if TYPE_CHECKING:
    from ctrainer.fsdp.sharded import Unit


# Tensors in what modules take and return, and memory for them.


FLOAT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """container with fn(tensor) for every tensor in dicts, lists, tuples and sets."""
    if isinstance(container, torch.Tensor):
        return fn(container)
    if isinstance(container, OrderedDict):
        made = container.__class__()
        for key, value in container.items():
            made[key] = apply_to_tensors(fn, value)
        return made
    if isinstance(container, PackedSequence):
        return container._replace(data=fn(container.data))
    if isinstance(container, dict):
        return {key: apply_to_tensors(fn, value) for key, value in container.items()}
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*(apply_to_tensors(fn, value) for value in container))
    if isinstance(container, list | tuple | set):
        return type(container)(apply_to_tensors(fn, value) for value in container)
    return container


def cast_floats(dtype: torch.dtype, container: Any) -> Any:
    """container with its floating point tensors as dtype."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, container)


def tensor_over(
    memory: _C.MappedMemory, dtype: torch.dtype, offset: int, shape: torch.Size
) -> torch.Tensor:
    """A view of memory that begins at element `offset`."""
    if not memory.on_host:
        row = from_dlpack(memory)
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype, device=row.device)
        begin = offset * dtype.itemsize
        row = row[begin : begin + shape.numel() * dtype.itemsize]
        return row.view(dtype).view(shape)
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(
        memory,
        dtype=dtype,
        offset=offset * dtype.itemsize,
        count=shape.numel(),
    )
    return flat.view(shape)


def new_zeros(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """float32 zeros whose pages, in the host's memory, go back to the system with the
    tensor: what malloc frees in pieces of a few MiB may stay with the process.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.float32, device=device)
    memory = _C.MappedMemory(shape.numel() * torch.float32.itemsize)
    return tensor_over(memory, torch.float32, 0, shape)


# How a module's parameters become groups, and what of them is on this rank.


SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


@dataclass
class Place:
    """A parameter as a module has it; a tied one has several places."""

    module_name: str
    module: nn.Module
    name: str

    @property
    def path(self) -> str:
        return f"{self.module_name}.{self.name}" if self.module_name else self.name


@dataclass
class Entry:
    """A parameter in its group: elements [at, at + numel)."""

    param: Any  # an nn.Parameter
    places: list[Place]
    at: int = 0
    trains: bool = True  # or is frozen since it was wrapped, in a group that trains

    @property
    def numel(self) -> int:
        return int(self.param.numel())


@dataclass
class Group:
    """Parameters that lie side by side, padded to size elements."""

    name: str  # "<module path>.<name>" of what is sharded
    entries: list[Entry]
    orig_size: torch.Size
    requires_grad: bool
    size: int = 0
    shard_shape: torch.Size = field(default_factory=lambda: torch.Size([0]))

    @property
    def is_divided(self) -> bool:
        """Whether ranks have parts of it."""
        return self.size != self.shard_shape.numel()


class Part(NamedTuple):
    """What of a parameter a rank has: its elements in C order, from `begin` on. The
    ranks of the group have all of them, in rank order. Optimizers that look at whole
    parameters read it, as the attribute `_part` of what they update."""

    communicator: _C.Communicator
    begin: int
    shape: tuple[int, ...]  # of the whole parameter


def part_of(entry: Entry, begin: int, communicator: _C.Communicator) -> Part:
    """The part of a parameter in what begins at element `begin` of its group."""
    own = min(max(begin - entry.at, 0), entry.numel)
    return Part(communicator, own, tuple(entry.param.size()))


@dataclass(frozen=True)
class Sharding:
    """Whose part is which. on_dim_0: whole rows; pads: with zeros up to a multiple."""

    communicator: _C.Communicator
    rank: int
    world_size: int
    multiple: int
    on_dim_0: bool
    pads: bool

    def fit(self, group: Group) -> None:
        """Set the group's size and the shape of its shards."""
        shape = group.orig_size
        if not self.on_dim_0:
            unit = self.world_size * self.multiple
            group.size = math.ceil(shape.numel() / unit) * unit
            group.shard_shape = torch.Size([group.size // self.world_size])
            return
        rows = shape[0]
        assert self.pads or rows % self.world_size == 0, (
            f"{group.name} of shape {tuple(shape)} cannot be shared by its rows among "
            f"{self.world_size} ranks; pass on_neuron=False, which pads"
        )
        own = math.ceil(rows / self.world_size)
        group.shard_shape = torch.Size([own, *shape[1:]])
        group.size = group.shard_shape.numel() * self.world_size

    def shard_of(self, group: Group, on_host: bool) -> Any:
        """This rank's part of the group's values, in memory of its own: the host's, or
        where the parameters are."""
        place = torch.device("cpu") if on_host else group.entries[0].param.device
        shard = new_zeros(group.shard_shape, place)
        begin = self.rank * shard.numel()
        flat = shard.view(-1)
        for entry in group.entries:
            low = max(begin, entry.at)
            high = min(begin + shard.numel(), entry.at + entry.numel)
            if low < high:
                values = entry.param.detach().reshape(-1)
                flat[low - begin : high - begin] = values[
                    low - entry.at : high - entry.at
                ]
        made = nn.Parameter(shard, requires_grad=group.requires_grad)
        self.mark(made, group)
        return made

    def mark(self, shard: Any, group: Group) -> None:
        """The attributes by which checkpoints, outer units and optimizers know a
        shard."""
        shard._is_sharded = True
        reject_hooks(shard)
        shard._orig_size = group.orig_size
        shard._orig_name = group.name
        shard._is_part = group.is_divided or len(group.entries) > 1
        if len(group.entries) == 1:
            begin = self.rank * shard.numel()
            shard._part = part_of(group.entries[0], begin, self.communicator)
        shard._name = f"_fsdp_shard.{group.name}".replace(".", SEPARATOR)


def reject_hooks(param: Any) -> None:
    """Let the parameter turn down hooks, which autograd would never call."""
    param.register_hook = param.register_post_accumulate_grad_hook = _reject_hook


def _reject_hook(hook: object) -> None:
    raise RuntimeError(
        "a sharded parameter takes no hooks: its gradient comes from a reduction over "
        "the ranks, not from autograd, which would never call them. Change gradients "
        "after backward(), or give hooks to activations in forward()"
    )


def entries_of(root: nn.Module, params: Iterable[nn.Parameter]) -> list[Entry]:
    """The parameters among params below root, in the order of its modules; of one that
    is there under several names every place."""
    wanted, found = set(params), dict[nn.Parameter, Entry]()
    for module_name, module in root.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is None or param not in wanted:
                continue
            entry = found.setdefault(param, Entry(param, []))
            entry.places.append(Place(module_name, module, name))
    assert len(found) == len(wanted), (
        "there are parameters in params_to_shard not belonging to this module."
    )
    return list(found.values())


def of_other_units(root: nn.Module) -> list[tuple[Place, Any]]:
    """Parameters below root that a unit outside of it has taken over."""
    return [
        (Place(module_name, module, name), param)
        for module_name, module in root.named_modules()
        for name, param in module._parameters.items()
        if hasattr(param, "_sharded_param")
    ]


def line_up(entries: list[Entry]) -> int:
    """Put the entries side by side; how many elements they are."""
    at = 0
    for entry in entries:
        entry.at = at
        at += entry.numel
    return at


def flat_group(name: str, entries: list[Entry]) -> Group:
    dtypes = {entry.param.dtype for entry in entries}
    assert len(dtypes) == 1, f"expects all parameters to have same dtype: {dtypes}"
    size = torch.Size([line_up(entries)])
    return Group(name, entries, size, entries[0].param.requires_grad)


def under(group: Group, path: str) -> Group:
    """The group by its name from further out."""
    return dataclasses.replace(group, name=f"{path}.{group.name}")


def lone_group(entry: Entry) -> Group:
    """Of one parameter, under the name of its first place."""
    size = entry.param.size()
    return Group(entry.places[0].path, [entry], size, entry.param.requires_grad)


def hide(place: Place, param: nn.Parameter) -> None:
    """Out of the module's table; forward() still finds it."""
    place.module._parameters.pop(place.name, None)
    object.__setattr__(place.module, place.name, param)


def replace_parameters(unit: Unit, groups: list[Group], dtype: torch.dtype) -> None:
    """Let the groups' parameters be views of the unit's memory, out of sight.

    They leave their modules' tables, so that parameters() yields shards alone, and
    stay where forward() finds them.
    """
    for number, (group, offset) in enumerate(zip(groups, unit.offsets, strict=True)):
        for entry in group.entries:
            for place in entry.places:
                hide(place, entry.param)
            param, shape = entry.param, entry.param.size()
            param.grad = None
            param.data = tensor_over(unit.full, dtype, offset + entry.at, shape)
            if group.requires_grad:
                index = unit.add_parameter(number, entry.at, entry.numel)
                hook = functools.partial(unit.take_grad, index)
                param.requires_grad_(True)  # a copy's may be frozen meanwhile
                param.register_post_accumulate_grad_hook(hook)
                param.requires_grad_(entry.trains)


# Parameters that are frozen, or trained again, after their module was wrapped.


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


# A shard by the parameters that lie in it, for optimizers that tell them apart.


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
        reject_hooks(view)
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
