"""Buffers in the dtype that a module computes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cast_buffers(root: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating point buffers below root, those of inner units too.

    The dtype that a buffer had at first is kept in its `_orig_dtype`.
    """
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                cast: Any = buffer.to(dtype)
                cast._orig_dtype = getattr(buffer, "_orig_dtype", buffer.dtype)
                setattr(module, name, cast)
