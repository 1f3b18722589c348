"""The groups of a module's parameters, this rank's shards of them, and the views of
shards by parameter.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence
from torch.utils.dlpack import from_dlpack

from ctrainer import _C

if TYPE_CHECKING:
    from ctrainer.fsdp.sharded import Unit


# Tensors in containers, and memory for them.


FLOAT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# That frozen parameters may have beside them: those that the core has.
FROZEN_DTYPES = [
    torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
]  # fmt: skip


def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """Return a container with fn(tensor) for every tensor in dicts and other mappings,
    lists, tuples, sets and packed sequences.

    Args:
        fn (Callable[[torch.Tensor], Any]): Called with a tensor; None for the data of a
            packed sequence, changed in place, leaves it there.
        container: The container, or a tensor.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import apply_to_tensors
        >>> apply_to_tensors(torch.Tensor.item, {"loss": [torch.ones(1)], "step": 3})
        {'loss': [1.0], 'step': 3}
    """
    if isinstance(container, torch.Tensor):
        return fn(container)
    if isinstance(container, OrderedDict):
        made = container.__class__()
        for key, value in container.items():
            made[key] = apply_to_tensors(fn, value)
        return made
    if isinstance(container, PackedSequence):
        made = fn(container.data)
        return container if made is None else container._replace(data=made)
    if isinstance(container, dict):
        return {key: apply_to_tensors(fn, value) for key, value in container.items()}
    if isinstance(container, MutableMapping):
        changed: Any = copy.copy(container)
        for key, value in container.items():
            changed[key] = apply_to_tensors(fn, value)
        return changed
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*(apply_to_tensors(fn, value) for value in container))
    if isinstance(container, list | tuple | set):
        return type(container)(apply_to_tensors(fn, value) for value in container)
    return container


def collect_tensors(container: Any) -> list[torch.Tensor]:
    """Return the tensors in such containers as apply_to_tensors() takes, each once.

    Args:
        container: The container, or a tensor.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import collect_tensors
        >>> once = torch.ones(1)
        >>> collect_tensors({"a": once, "b": (once, 2)})
        [tensor([1.])]
    """
    found: dict[int, torch.Tensor] = {}

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        return found.setdefault(id(tensor), tensor)

    apply_to_tensors(collect, container)
    return list(found.values())


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
        flat = from_dlpack(memory)
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype, device=flat.device)
        begin = offset * dtype.itemsize
        flat = flat[begin : begin + shape.numel() * dtype.itemsize]
        return flat.view(dtype).view(shape)
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    n, at = shape.numel(), offset * dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, offset=at, count=n).view(shape)


def pinned_zeros(nbytes: int, plugin: object) -> _C.MappedMemory:
    """Zeros in host memory, pinned for the plugin's device."""
    return _C.MappedMemory(nbytes, pinned_for=plugin)


# Groups of parameters, and this rank's shards of them.


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
    dtype: torch.dtype = torch.float32  # of the shards; the parameter's is the gathered

    @property
    def numel(self) -> int:
        return int(self.param.numel())

    def overlap(self, begin: int, numel: int) -> tuple[slice, slice]:
        """What elements [begin, begin + numel) of the group have of the parameter:
        the places among these elements, and in the parameter."""
        low = max(begin, self.at)
        high = max(low, min(begin + numel, self.at + self.numel))
        own = slice(min(low - begin, numel), min(high - begin, numel))
        return own, slice(low - self.at, high - self.at)


@dataclass
class Group:
    """Parameters of one dtype behind each other, padded to size elements."""

    name: str  # "<module path>.<name>" of what is sharded
    entries: list[Entry]
    orig_size: torch.Size
    requires_grad: bool
    size: int = 0
    shard_shape: torch.Size = field(default_factory=lambda: torch.Size([0]))
    keeps_dtype: bool = False  # also where layers compute in another

    @property
    def dtype(self) -> torch.dtype:
        """Of the shards."""
        return self.entries[0].dtype

    def gathered_as(self, compute: torch.dtype | None) -> torch.dtype:
        """The dtype of the gathered parameters. None: their own, which integers
        always keep."""
        if compute is None or self.keeps_dtype or not self.dtype.is_floating_point:
            return self.dtype
        return compute

    @property
    def is_divided(self) -> bool:
        """Whether ranks have parts of it."""
        return self.size != self.shard_shape.numel()

    @property
    def grain(self) -> int:
        """The largest number of which all places of parameters and all cuts between
        ranks are multiples."""
        return math.gcd(self.shard_shape.numel(), *(e.at for e in self.entries))

    def spread(self, block: int) -> None:
        """Let every parameter of a flat group begin at a multiple of `block`."""
        end = 0
        for entry in self.entries:
            entry.at = math.ceil(end / block) * block
            end = entry.at + entry.numel
        self.orig_size = torch.Size([end])


class Part(NamedTuple):
    """A rank's part of a parameter: elements in C order, from `begin` on. The parts of
    the group's ranks, in rank order, are the whole parameter. Optimizers that need
    whole parameters read it from the attribute `_part`."""

    communicator: _C.Communicator
    begin: int
    shape: tuple[int, ...]  # of the whole parameter


def part_of(entry: Entry, begin: int, communicator: _C.Communicator) -> Part:
    """The part of a parameter in a shard that begins at element `begin`."""
    own = min(max(begin - entry.at, 0), entry.numel)
    return Part(communicator, own, tuple(entry.param.size()))


@dataclass(frozen=True)
class Sharding:
    """How groups are sharded. on_dim_0: along dimension 0; pads: with zeros to a
    multiple of the ranks. Else shards are as long as a multiple of `multiple`, which is
    one of `block`, and parameters begin at multiples of `block`."""

    communicator: _C.Communicator
    rank: int
    world_size: int
    multiple: int
    on_dim_0: bool
    pads: bool
    block: int = 1

    def fit(self, group: Group) -> None:
        """Set the places of parameters, the group's size and the shape of shards."""
        if len(group.entries) > 1:
            group.spread(self.block)
        shape = group.orig_size
        if not self.on_dim_0:
            unit = self.world_size * self.multiple
            group.size = math.ceil(shape.numel() / unit) * unit
            group.shard_shape = torch.Size([group.size // self.world_size])
            return
        if shape[0] % self.world_size and not self.pads:
            name = re.sub("_fsdp_wrapped_module[.]|_fpw_module[.]", "", group.name)
            raise ValueError(
                f"{name} of shape {tuple(shape)} cannot be sharded on dimension "
                f"0 over {self.world_size} ranks, as on_neuron=True has it: their "
                "number must divide its rows; pass on_neuron=False, which pads"
            )
        own = math.ceil(shape[0] / self.world_size)
        group.shard_shape = torch.Size([own, *shape[1:]])
        group.size = group.shard_shape.numel() * self.world_size

    def shard_of(self, group: Group, on_host: bool, plugin: object) -> Any:
        """This rank's shard of the group, a copy on the parameters' device or in host
        memory, pinned for the plugin's device."""
        shape = group.shard_shape
        if on_host:
            memory = pinned_zeros(shape.numel() * group.dtype.itemsize, plugin)
            shard = tensor_over(memory, group.dtype, 0, shape)
        else:
            device = group.entries[0].param.device
            shard = torch.zeros(shape, dtype=group.dtype, device=device)
        begin = self.rank * shard.numel()
        flat = shard.view(-1)
        for entry in group.entries:
            own, whole = entry.overlap(begin, shard.numel())
            flat[own] = entry.param.detach().reshape(-1)[whole]
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
        shard._is_divided = group.is_divided
        shard._is_part = group.is_divided or len(group.entries) > 1
        begin = self.rank * shard.numel()
        shard._numbers = (begin, group.orig_size.numel())
        if len(group.entries) == 1:
            shard._part = part_of(group.entries[0], begin, self.communicator)
        shard._name = f"_fsdp_shard.{group.name}".replace(".", SEPARATOR)


# Shards in a file.


def _in_pages(group: Group) -> int:
    """The bytes that a shard of the group takes there."""
    nbytes = group.shard_shape.numel() * group.dtype.itemsize
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def file_for(
    groups: Iterable[Group], folder: str | os.PathLike[str] | None
) -> _C.DiskMemory | None:
    """A new file in the folder for a rank's shards of the groups; None without folder
    or elements."""
    nbytes = sum(map(_in_pages, groups))
    return None if folder is None or nbytes == 0 else _C.DiskMemory(nbytes, folder)


@torch.no_grad()
def move_to_file(
    shards: Iterable[Any], groups: Iterable[Group], file: _C.DiskMemory | None
) -> None:
    """Give the shards memory in the file, each its pages, with the values that they
    have. Optimizers know the file by the attribute `_shard_file`."""
    at = 0
    for shard, group in zip(shards, groups, strict=True):
        if file is None or shard.numel() == 0:
            continue
        flat = torch.frombuffer(
            file, dtype=shard.dtype, offset=at, count=shard.numel()
        ).view(shard.shape)
        at += _in_pages(group)
        if shard.data_ptr() != flat.data_ptr():
            shard.data = flat.copy_(shard)
        shard._shard_file = file
    if file is not None:
        file.drop_pages()


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
    """The parameters among params below root, in the order of its modules; with all
    places of tied parameters."""
    wanted, found = set(params), dict[nn.Parameter, Entry]()
    for module_name, module in root.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is None or param not in wanted:
                continue
            entry = found.setdefault(param, Entry(param, [], dtype=param.dtype))
            entry.places.append(Place(module_name, module, name))
    assert len(found) == len(wanted), (
        "there are parameters in params_to_shard not belonging to this module."
    )
    return list(found.values())


def of_other_units(root: nn.Module) -> list[tuple[Place, Any]]:
    """Parameters below root that units outside of it own."""
    return [
        (Place(module_name, module, name), param)
        for module_name, module in root.named_modules()
        for name, param in module._parameters.items()
        if hasattr(param, "_sharded_param")
    ]


def beside_statistics(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of layers such as BatchNorm, which torch computes in the dtype of
    their running statistics alone."""
    return {
        param
        for layer in module.modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None
        for param in layer.parameters(recurse=False)
    }


def keep_unpacked(module: nn.Module) -> None:
    """Keep bitsandbytes' 4-bit weights as they were loaded.

    Where the processor has bfloat16 its layers replace them at an evaluation by whole
    packed weights, of which a state_dict() and a later gather know nothing.
    """
    for layer in module.modules():
        if getattr(layer, "support_avx512bf16_for_cpu", False):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            quantization = getattr(layer.weight, "quant_state", None)
            if getattr(quantization, "packing_format_for_cpu", False):
                layer.state_dict()  # unpacks the weight


def flat_group(name: str, entries: list[Entry]) -> Group:
    dtypes = {entry.param.dtype for entry in entries}
    assert len(dtypes) == 1, f"expects all parameters to have same dtype: {dtypes}"
    at = 0
    for entry in entries:
        entry.at, at = at, at + entry.numel
    return Group(name, entries, torch.Size([at]), entries[0].param.requires_grad)


def under(group: Group, path: str) -> Group:
    """The group by its name from further out."""
    return dataclasses.replace(group, name=f"{path}.{group.name}")


def lone_group(entry: Entry) -> Group:
    """Of one parameter, under the name of its first place."""
    size = entry.param.size()
    return Group(entry.places[0].path, [entry], size, entry.param.requires_grad)


def hide(place: Place, param: nn.Parameter) -> None:
    """Remove a parameter from its module's table; forward() still finds it."""
    place.module._parameters.pop(place.name, None)
    object.__setattr__(place.module, place.name, param)


def replace_parameters(
    unit: Unit, groups: list[Group], compute: torch.dtype | None
) -> list[Any]:
    """Make the groups' parameters views of the unit's memory, of this dtype or their
    own. Returns the handles of the hooks by which the unit takes gradients.

    They leave their modules' tables, so that parameters() yields shards alone, and
    forward() still finds them.
    """
    hooks = []
    for number, (group, offset) in enumerate(zip(groups, unit.offsets, strict=True)):
        dtype = group.gathered_as(compute)
        begin = offset // dtype.itemsize
        for entry in group.entries:
            for place in entry.places:
                hide(place, entry.param)
            param, shape = entry.param, entry.param.size()
            param.grad = None
            param.data = tensor_over(unit.full, dtype, begin + entry.at, shape)
            if group.requires_grad:
                index = unit.add_parameter(number, entry.at, entry.numel)
                hook = functools.partial(unit.take_grad, index)
                param.requires_grad_(True)  # a copy's may be frozen meanwhile
                hooks.append(param.register_post_accumulate_grad_hook(hook))
                param.requires_grad_(entry.trains)
    return hooks


# Views of a shard, one for each parameter, for use_orig_params.


Pieces = list[tuple[nn.Parameter, int]]  # a view, and where it begins in the shard


class Views:
    """The views of a shard; their gradients are views of its gradient."""

    def __init__(
        self, shard: nn.Parameter, group: Group, communicator: _C.Communicator
    ) -> None:
        self.pieces = _views_of(shard, group, communicator)
        self.numel = shard.numel()
        self.shape = shard.shape

    @property
    def grad(self) -> torch.Tensor | None:
        """The flat gradient that the next one is added to; -0 for views without a
        gradient, or that are frozen; None if no view has a gradient.

        A gradient that was replaced is copied to its place.
        """
        if all(view.grad is None for view, _ in self.pieces):
            return None
        flat = self._flat_grad()
        for view, begin in self.pieces:
            place = _place(flat, view, begin)
            if view.grad is None or not view.requires_grad:
                if view.grad is not None:
                    view.grad = view.grad.clone()
                place.fill_(-0.0)  # as the sum without a gradient
                continue
            if view.grad.data_ptr() != place.data_ptr():
                place.copy_(view.grad)
            view.grad = place
        return flat.view(self.shape)

    def receive(self, grad: torch.Tensor, missing: list[int]) -> None:
        """Set the views' gradients to views of a reduced one, but for `missing`."""
        flat = grad.detach().view(-1)
        for number, (view, begin) in enumerate(self.pieces):
            if view.grad is None and view.requires_grad and number not in missing:
                view.grad = _place(flat, view, begin)

    def _flat_grad(self) -> torch.Tensor:
        """The tensor that the views' gradients are views of, or a new one."""
        for view, begin in self.pieces:
            grad = view.grad
            base = None if grad is None or grad.numel() == 0 else grad._base
            if grad is None or base is None or base.numel() != self.numel:
                continue
            if base.view(-1)[begin:].data_ptr() == grad.data_ptr():
                return base.view(-1)
        first, _ = self.pieces[0]
        return torch.zeros(self.numel, dtype=first.dtype, device=first.device)

    def follow(self, shard: nn.Parameter) -> None:
        """Become views of another shard: optimizers keep the views."""
        for view, begin in self.pieces:
            view.data = _place(shard.detach().view(-1), view, begin)


def _place(flat: torch.Tensor, view: torch.Tensor, begin: int) -> torch.Tensor:
    return flat[begin : begin + view.numel()].view(view.shape)


def _views_of(shard: Any, group: Group, communicator: _C.Communicator) -> Pieces:
    """A view of every parameter's part of the shard, flat or sharded on dimension 0.

    A parameter without elements on this rank has an empty view: all ranks' optimizers
    have the same parameters.
    """
    flat, offset = shard.detach().view(-1), communicator.rank * shard.numel()
    pieces: Pieces = []
    for entry in group.entries:
        own, _ = entry.overlap(offset, shard.numel())
        values = flat[own]
        if shard.dim() > 1:
            values = values.view(-1, *shard.shape[1:])
        view: Any = nn.Parameter(values, requires_grad=group.requires_grad)
        view._is_sharded = True
        view._is_divided = group.is_divided
        reject_hooks(view)
        view._part = part_of(entry, offset, communicator)
        view._numbers = (view._part.begin, entry.numel)
        view._shard_file = getattr(shard, "_shard_file", None)
        view._orig_size = entry.param.size()
        # Not the parameter, whose hook has the unit and so its views: torch's hooks
        # hide such cycles from Python's collector.
        view._unit = entry.param._unit
        pieces.append((view, own.start))
    return pieces


# ---- the parameters in the modules' tables


def make(unit: Any) -> None:
    """Make the views of a unit's shards the parameters of its modules."""
    unit._views = [
        Views(shard, group, unit.communicator)
        for shard, group in zip(unit.sharded_params, unit._groups, strict=True)
    ]
    unit._unit.grad_owners = unit._views
    show_views(unit)


def adopt(unit: Any, copied: list[Views]) -> None:
    """Make views that were copied with an optimizer the unit's own."""
    each = zip(unit._views, copied, unit.sharded_params, strict=True)
    for own, views, shard in each:
        for (made, _), (view, _) in zip(own.pieces, views.pieces, strict=True):
            view.__dict__.update(made.__dict__)
        views.follow(shard)
    unit._views = unit._unit.grad_owners = copied
    show_views(unit)


def show_views(unit: Any) -> None:
    """List the views in the modules' tables, under the names before wrapping.

    forward() still finds the full parameters: an instance's attributes come before
    nn.Module's tables.
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
    """List the shards in the unit's table, for checkpoints."""
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
    """Within it, units with views list their shards instead."""
    changed = [unit for unit in units if views_shown(unit)]
    for unit in changed:
        show_shards(unit)
    try:
        yield
    finally:
        for unit in changed:
            show_views(unit)


def before_load(unit: Any, *unused: object) -> None:
    """The hook of load_state_dict: states have shards."""
    if views_shown(unit):
        show_shards(unit)


def after_load(unit: Any) -> None:
    """Make the views follow the unit's new shards."""
    for views, shard in zip(unit._views, unit.sharded_params, strict=True):
        views.follow(shard)
    show_views(unit)
