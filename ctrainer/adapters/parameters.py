"""Parameters by their names and groups, for models and optimizers of any framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """The model's parameters, named by its named_parameters() or by their numbers."""
    named = getattr(model, "named_parameters", None)
    if callable(named):
        yield from named()
    else:
        pairs: Iterable[Any] = enumerate(model.parameters())
        yield from ((str(i), parameter) for i, parameter in pairs)


def optimizer_groups(
    model: Any, decay: list[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay, of the parameters that train."""
    chosen = set(decay)
    groups: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            groups[name not in chosen].append(parameter)
    return [
        {"params": groups[0], "weight_decay": weight_decay},
        {"params": groups[1], "weight_decay": 0.0},
    ]


def stray_parameters(model: Any, optimizer: Any) -> bool:
    """Has the model a parameter that trains and is not the optimizer's?"""
    known = {id(p) for g in optimizer.param_groups for p in g["params"]}
    return any(p.requires_grad and id(p) not in known for p in model.parameters())


def grads_of(group: dict[str, Any]) -> list[Any]:
    """The gradients of a group's parameters that have one."""
    return [p.grad for p in group["params"] if p.grad is not None]


def parameter_labels(model: Any, depth: int | None) -> dict[Any, str]:
    """The names of the model's parameters, or the first `depth` parts of them."""
    return {p: ".".join(name.split(".")[:depth]) for name, p in named_parameters(model)}
