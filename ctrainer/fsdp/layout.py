"""How a module's parameters become groups, and what of them is on this rank."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ctrainer.fsdp._tensors import new_zeros, tensor_over

if TYPE_CHECKING:
    from ctrainer import _C
    from ctrainer.fsdp.unit import Unit

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
        refuse_hooks(shard)
        shard._orig_size = group.orig_size
        shard._orig_name = group.name
        shard._is_part = group.is_divided or len(group.entries) > 1
        if len(group.entries) == 1:
            begin = self.rank * shard.numel()
            shard._part = part_of(group.entries[0], begin, self.communicator)
        shard._name = f"_fsdp_shard.{group.name}".replace(".", SEPARATOR)


def refuse_hooks(param: Any) -> None:
    """Let the parameter turn down hooks, which autograd would never call."""
    param.register_hook = param.register_post_accumulate_grad_hook = _refuse_hook


def _refuse_hook(hook: object) -> None:
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
