"""Where Inf and NaN come from: the first module and tensor that has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn


class NonFiniteError(FloatingPointError):
    """A tensor of a module held Inf or NaN."""


@dataclass(frozen=True)
class Finding:
    """A tensor that is not finite: what it is, of which module, and how bad."""

    what: str
    module: str
    kind: str
    shape: tuple[int, ...]
    n_nan: int
    n_inf: int

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.module} ({self.kind}), shape {self.shape}: "
            f"{self.n_nan} NaN and {self.n_inf} Inf"
        )


class NanDetector:
    """While it is open, notes every tensor that is not finite, in the order in which
    forward and backward make them: outputs, then gradients of outputs.

    modules: root modules by their names in findings.
    stop: raise NonFiniteError at the first one.

    first_raising is the innermost module whose forward raised.
    """

    def __init__(self, modules: Mapping[str, nn.Module], stop: bool = False) -> None:
        self.findings: list[Finding] = []
        self._modules, self._stop = modules, stop
        self._handles: list[Any] = []
        self._running: list[str] = []

    @property
    def first_raising(self) -> str | None:
        return self._running[-1] if self._running else None

    def __enter__(self) -> Self:
        for name, module in _named_modules(self._modules):
            self._handles.append(module.register_forward_pre_hook(self._begin(name)))
            self._handles.append(module.register_forward_hook(self._end(name)))
        for name, module in _named_modules(self._modules):
            for key, parameter in module.named_parameters(recurse=False):
                self._look(parameter, f"parameter {key}", name, module)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._running.append(name)

        return hook

    def _end(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for place, tensor in _tensors(output):
                self._look(tensor, f"output{place}", name, module)
                if tensor.requires_grad:
                    hook_of: Any = tensor.register_hook
                    hook_of(self._backward(name, module, place))
            self._running.pop()

        return hook

    def _backward(self, name: str, module: nn.Module, place: str) -> Any:
        def hook(grad: torch.Tensor) -> None:
            self._look(grad, f"gradient of output{place}", name, module)

        return hook

    def _look(
        self, tensor: torch.Tensor, what: str, name: str, module: nn.Module
    ) -> None:
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            return
        found = Finding(
            what,
            name,
            type(module).__name__,
            tuple(tensor.shape),
            int(torch.isnan(tensor).sum()),
            int(torch.isinf(tensor).sum()),
        )
        self.findings.append(found)
        if self._stop:
            raise NonFiniteError(str(found))


def _named_modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path, an outer one before those in it."""
    for root, module in roots.items():
        for path, inner in module.named_modules():
            yield f"{root}.{path}" if path else root, inner


def _tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested output and where they are in it."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{place}[{i}]")


def nonfinite_grads(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradients hold an Inf or a NaN."""
    return [
        name
        for name, p in model.named_parameters()
        if p.grad is not None and not bool(torch.isfinite(p.grad).all())
    ]
