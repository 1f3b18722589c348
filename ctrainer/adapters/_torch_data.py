"""torch's data loaders, and tensors over NumPy's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

__all__ = ["current_device", "default_collate", "loader", "tensor_over", "use_device"]


def loader(dataset: Any, collate: Callable[[Any], Any] | None, **options: Any) -> Any:
    """A DataLoader that pins its batches where there is a GPU to copy them to."""
    pin = torch.cuda.is_available()
    return DataLoader(dataset, collate_fn=collate, pin_memory=pin, **options)


def current_device() -> int | None:
    """This thread's CUDA device, or None without CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def use_device(device: int) -> None:
    """Makes a device this thread's: pinning memory then makes no context on GPU 0."""
    torch.cuda.set_device(device)


# A tensor over a NumPy array's memory.
tensor_over = torch.from_numpy
