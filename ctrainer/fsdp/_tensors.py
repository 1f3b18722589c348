"""Tensors in what modules take and return, and memory for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.dlpack import from_dlpack

from ctrainer import _C

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
