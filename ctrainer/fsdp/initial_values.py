"""The values of parameters and buffers before they are sharded: a module's own, new
values for a module on the meta device, or those of the first rank; and their device.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.comm.parallel import describe
from ctrainer.fsdp import options

Init = Callable[[nn.Module], object]


def settle(
    module: nn.Module,
    init: Init,
    groups: Sequence[_C.Communicator],
    unit: type,
    device: torch.device | None,
) -> None:
    """Give the tensors of `module` that are not in an inner unit values, on `device`.

    init: called with each module that has parameters or buffers of its own on the meta
    device. groups: the first rank's values go to all ranks of the first group, then of
    the next, and only that rank needs values; empty: each rank has its own. device:
    where tensors of the CPU and the meta device are moved; None: to a GPU, where the
    first rank's are on one. Collective over the groups.

    Raises ValueError, on all ranks of the groups, for tensors that init leaves on the
    meta device, and for names, shapes, dtypes or kinds of device that differ.
    """
    own = [m for m, _ in _outside(module, unit)]
    first = all(group.rank == 0 for group in groups)
    said = [_materialize(own, init), _kind_of(own)] if first else []
    for group in groups:
        said = json.loads(group.broadcast_bytes(json.dumps(said).encode(), 0))
    problem, kind = said
    if problem:
        raise ValueError(problem)
    if groups and device is None and kind != "cpu":
        device = options.current(kind)
    if groups:
        _take(module, groups, unit, device)
    if device is not None:
        _move(own, device)


def is_on_meta(module: nn.Module, recurse: bool = True) -> bool:
    """Has it a parameter or buffer without values?"""
    tensors = (*module.parameters(recurse), *module.buffers(recurse))
    return any(tensor.is_meta for tensor in tensors)


def _outside(
    module: nn.Module, unit: type, prefix: str = ""
) -> Iterator[tuple[nn.Module, str]]:
    """The module and those below, without units and what is in them."""
    yield module, prefix
    for name, child in module.named_children():
        if not isinstance(child, unit):
            yield from _outside(child, unit, f"{prefix}{name}.")


# Torch's setting is the process's, not a thread's.
_swapping = threading.Lock()


def _materialize(own: list[nn.Module], init: Init) -> str:
    """What is wrong, or nothing. Tied parameters stay tied: torch swaps them for
    others, and does so with all of the process while it is set to."""
    empty = [module for module in own if is_on_meta(module, recurse=False)]
    if not empty:
        return ""
    future = torch.__future__
    with _swapping:
        before = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(True)
        try:
            return _fill(empty, init)
        except ValueError as error:  # for the other ranks, too
            return str(error)
        finally:
            future.set_swap_module_params_on_conversion(before)


def _fill(empty: list[nn.Module], init: Init) -> str:
    for module in empty:
        if is_on_meta(module, recurse=False):  # still: an init may go deeper
            init(module)
        if is_on_meta(module, recurse=False):
            return (
                f"param_init_fn has left parameters of a {type(module).__name__} on "
                "the meta device; expected module.to_empty(device='cpu', "
                "recurse=False) and their values"
            )
    return ""


# ---- the first rank's


@torch.no_grad()
def _take(
    module: nn.Module,
    groups: Sequence[_C.Communicator],
    unit: type,
    device: torch.device | None,
) -> None:
    named = dict(_named(module, unit))
    different = {id(tensor): tensor.detach() for tensor in named.values()}
    kinds = {(device or tensor.device).type for tensor in named.values()}
    lines = f"{describe(named)}its device: {' and '.join(sorted(kinds))}\n"
    for group in groups:
        _C.check_ranks_agree(group, "parameter or buffer", lines)
        pairs = [(tensor, tensor.cpu()) for tensor in different.values()]
        _C.broadcast_tensors(group, [on_host for _, on_host in pairs])
        for tensor, on_host in pairs:
            if on_host is not tensor:  # of a GPU, through the host's memory
                tensor.copy_(on_host)


def _named(module: nn.Module, unit: type) -> Iterator[tuple[str, torch.Tensor]]:
    """On the CPU, those of the meta device without values."""
    for part, prefix in _outside(module, unit):
        materialize(part)
        for name, tensor in _own(part):
            if not hasattr(tensor, "_sharded_param"):  # of another unit
                yield f"{prefix}{name}", tensor


def _kind_of(own: list[nn.Module]) -> str:
    """The type of the device of the first tensor that is of no other unit."""
    for module in own:
        for _, tensor in _own(module):
            if not hasattr(tensor, "_sharded_param"):
                return tensor.device.type
    return "cpu"


def _move(own: list[nn.Module], device: torch.device) -> None:
    """As module.to(device) does, what is in host memory and of no other unit."""

    def is_here(tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and not hasattr(tensor, "_sharded_param")

    with _swapping:  # or parameters would lose their attributes
        module: Any
        for module in own:
            if any(is_here(tensor) for _, tensor in _own(module)):
                module._apply(lambda t: t.to(device) if is_here(t) else t, False)


def materialize(module: nn.Module, fill: Callable[..., object] | None = None) -> None:
    """Put the module's own parameters and buffers that are on the meta device on the
    CPU. They stay the same objects, with what was set on them; only transformers' mark
    that there are values goes.

    fill: called with each. Raises RuntimeError for one that something else refers to.
    """
    for table in (module._parameters, module._buffers):
        for tensor in table.values():
            if tensor is not None and tensor.is_meta:
                move(tensor)
                if fill is not None:
                    fill(tensor)


def move(tensor: torch.Tensor) -> None:
    """Put one on the CPU, without values yet."""
    kept = {k: v for k, v in tensor.__dict__.items() if k != "_is_hf_initialized"}
    made = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    tensor.__dict__.update(kept)


# ---- new ones


def initializer(root: nn.Module) -> Init:
    """What gives modules below `root` the values that they begin a training with.

    `_init_weights(module)` of the innermost module around that has it, as transformers'
    models do, or else the module's own reset_parameters().
    """
    around = {root: getattr(root, "_init_weights", None)}
    for module in root.modules():  # those around before those in them
        for child in module.children():
            own = getattr(child, "_init_weights", around[module])
            around.setdefault(child, own)
    return lambda module: _initialize(module, around.get(module))


@torch.no_grad()
def zeros(module: nn.Module) -> None:
    """Zeros, for values that are loaded afterwards."""
    materialize(module, torch.Tensor.zero_)


def _initialize(module: nn.Module, outer: Any) -> None:
    """Raises ValueError where some of the module's own values are not set."""
    materialize(module, _mark)
    versions = {name: t._version for name, t in _own(module)}
    left = list(versions)
    for way in _ways(module, outer):
        way()
        left = _unset(module, versions)
        if not left:
            return
    if left:
        raise ValueError(
            f"{', '.join(left)} of a {type(module).__name__} on the meta device got no "
            "values: it has no reset_parameters(), and no module around it has an "
            "_init_weights(module) that knows it. Pass param_init_fn, or make the "
            "model on the CPU on the first rank"
        )


def _ways(module: nn.Module, outer: Any) -> Iterator[Callable[[], object]]:
    if outer is not None:
        yield lambda: outer(module)
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            yield getattr(module, name)


def _own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in tensors if tensor is not None]


@torch.no_grad()
def _mark(tensor: torch.Tensor) -> None:
    """NaN says that an element has no value."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def _unset(module: nn.Module, versions: dict[str, int]) -> list[str]:
    """Numbers that cannot be NaN are set when anything has been written."""
    return [
        name
        for name, tensor in _own(module)
        if (
            bool(tensor.isnan().any())
            if tensor.is_floating_point()
            else tensor._version == versions[name]
        )
    ]
