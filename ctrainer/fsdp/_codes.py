"""What the codes of gradients have missed so far, of all units: saved and loaded."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer.fsdp._tensors import tensor_over


def _residuals(root: Any) -> dict[str, torch.Tensor]:
    """By the name of the unit, over its own memory."""
    found = {}
    for name, unit in root.named_modules():
        memory = getattr(getattr(unit, "_unit", None), "residual", None)
        if memory is not None and unit in root.units():
            size = torch.Size([memory.nbytes // torch.float32.itemsize])
            found[name] = tensor_over(memory, torch.float32, 0, size)
    return found


def state_dict(root: Any) -> dict[str, torch.Tensor]:
    return {name: residual.clone() for name, residual in _residuals(root).items()}


def load_state_dict(root: Any, state: dict[str, Any]) -> None:
    residuals = _residuals(root)
    expected = {name: r.numel() for name, r in residuals.items()}
    given = {name: value.numel() for name, value in state.items()}
    if given != expected:
        raise ValueError(
            f"error feedback is of units with {given} elements; expected {expected}, "
            "of as many ranks: with others leave it out, and begin with none"
        )
    for name, residual in residuals.items():
        residual.copy_(state[name])
