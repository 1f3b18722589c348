"""The tensors of a torch module that ranks share, and buckets for their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's list of names, on a module


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that need gradients, by name; one of several names by its first."""
    skipped = ignored(module)
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in skipped
    }


def frozen(module: nn.Module) -> list[torch.Tensor]:
    """Parameters that need no gradients, and may later."""
    skipped = ignored(module)
    named = module.named_parameters()
    return [p for name, p in named if not p.requires_grad and name not in skipped]


def shared_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by name, detached."""
    skipped = ignored(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name not in skipped}


def shared_buffers(module: nn.Module) -> list[torch.Tensor]:
    skipped = ignored(module)
    return [tensor for name, tensor in module.named_buffers() if name not in skipped]


def describe(tensors: dict[str, torch.Tensor]) -> str:
    """A line for each: its name, dtype, shape, and strides where they are unusual."""
    return "".join(f"{name} {_look(tensor)}\n" for name, tensor in tensors.items())


@torch.no_grad()
def allocate(params: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A flat tensor, and views of it with the sizes and strides of params, which are
    of one dtype and have no gaps."""
    numel = sum(p.numel() for p in params)
    flat = torch.empty(numel, dtype=params[0].dtype, device=params[0].device)
    views, at = [], 0
    for p in params:
        views.append(flat.as_strided(p.size(), p.stride(), at))
        at += p.numel()
    return flat, views


def are_trainable(params: Iterable[torch.Tensor]) -> list[bool]:
    return [param.requires_grad for param in params]


def queue_callback(function: Any) -> None:
    """Have autograd call the function at the end of the backward pass under way."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def ignored(module: nn.Module) -> frozenset[str]:
    """The names that torch's wrapper ignores."""
    return frozenset(getattr(module, _IGNORED, ()))


def _look(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.is_contiguous():
        text += f" with strides {list(tensor.stride())}"
    return text + ("" if tensor.requires_grad else " frozen")
