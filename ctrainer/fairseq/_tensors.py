"""What the metrics need to know of torch, which they never import themselves: a value
can only be a tensor where somebody else has."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

# A number, an array or a tensor of one element.
Scalar: TypeAlias = Any


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_tensor(value)


def type_as(total: Scalar, value: Scalar) -> Scalar:
    """`total` on the device and in the dtype of `value`, where both are tensors."""
    if isinstance(total, (int, float)):  # nearly always: spare the look at torch
        return total
    return total.to(value) if is_tensor(total) and is_tensor(value) else total
