"""torch: what splitting a micro-batch that ran out of memory asks of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def gradient_marks(modules: Sequence[nn.Module]) -> list[tuple[int, int] | None]:
    """Of each parameter's gradient its identity and version, which an addition raises
    by one: other marks, other gradients."""
    grads = [p.grad for p in _parameters(modules)]
    return [None if g is None else (id(g), g._version) for g in grads]


def drop_gradients(
    modules: Sequence[nn.Module], places: Sequence[int] | None = None
) -> None:
    """Of the parameters at these places of gradient_marks(); None: of all."""
    for i, parameter in enumerate(_parameters(modules)):
        if places is None or i in places:
            parameter.grad = None


def hold_gradients(modules: Sequence[nn.Module], places: Sequence[int]) -> list[Any]:
    """Let backward passes add nothing to the gradients of the parameters at these
    places, until all of the handles that are returned are removed."""
    parameters: list[Any] = _parameters(modules)
    return [parameters[i].register_hook(_nothing) for i in places]


def _nothing(grad: torch.Tensor) -> torch.Tensor:
    if grad.layout != torch.strided:
        return torch.zeros_like(grad)
    return grad.new_zeros(()).expand_as(grad)  # takes no memory


def _parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters()]


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
