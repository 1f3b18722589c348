"""torch: what splitting a micro-batch that ran out of memory asks of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def gradient_marks(model: nn.Module) -> list[tuple[int, int] | None]:
    """Of each parameter's gradient its identity and version: other marks, other
    gradients."""
    grads = [p.grad for p in model.parameters()]
    return [None if g is None else (id(g), g._version) for g in grads]


def zero_grads(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def same_rng(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Are torch's generators in the same state? On the CPU and the current GPU."""
    names = [name for name in ("cpu", "cuda") if name in a and name in b]
    return all(torch.equal(a[name], b[name]) for name in names)


def normalizes_batches(model: nn.Module) -> bool:
    """Has the model a BatchNorm that normalizes by the batch?"""
    kinds = nn.modules.batchnorm._BatchNorm
    return any(isinstance(m, kinds) and m.training for m in model.modules())


@contextlib.contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; each module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
