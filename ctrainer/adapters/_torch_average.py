"""torch: the tensors of a model that an average is of."""

from __future__ import annotations

import torch
from torch import nn


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What state_dict() holds but for frozen parameters, each tensor once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        trains = not isinstance(value, nn.Parameter) or value.requires_grad
        if isinstance(value, torch.Tensor) and trains and id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def pieces(
    value: torch.Tensor, average: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What an optimizer updates of a tensor, each with its average: of a shard that has
    views these, and else the tensor."""
    views = getattr(value, "_pieces", None)
    if views is None:
        return [(value, average)]
    row = average.view(-1)
    return [
        (view, row[begin : begin + view.numel()].view(view.shape))
        for view, begin in views
        if view.numel() > 0
    ]


def copy_of(tensor: torch.Tensor, fp32: bool) -> torch.Tensor:
    wanted = torch.float32 if fp32 and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wanted, copy=True)


@torch.no_grad()
def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


@torch.no_grad()
def exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Swap the contents of two tensors of one dtype."""
    kept = a.detach().clone()
    a.copy_(b)
    b.copy_(kept)
