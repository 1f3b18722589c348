"""Parameters by their names and groups, for models and optimizers of any framework."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

logger = logging.getLogger("ctrainer.trainer")


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
    """Has the model a parameter that trains and is not the optimizer's? Warns where
    none is."""
    known = {id(p) for g in optimizer.param_groups for p in g["params"]}
    training = {id(p) for p in model.parameters() if p.requires_grad}
    if training and known.isdisjoint(training):
        logger.warning(
            "the optimizer has none of the model's parameters: the run will change "
            "nothing. Make the optimizer of model.parameters() of the model that is "
            "trained, where that is wrapped or copied after wrapping or copying it."
        )
    return not training <= known


def updates_others(model: Any, optimizer: Any) -> bool:
    """Has the optimizer parameters that are not the model's, such as a loss's, beside
    those that are?"""
    known = {id(p) for g in optimizer.param_groups for p in g["params"]}
    own = {id(p) for p in model.parameters()}
    return not known <= own and not known.isdisjoint(own)


def grads_of(group: dict[str, Any]) -> list[Any]:
    """The gradients of a group's parameters that have one."""
    return [p.grad for p in group["params"] if p.grad is not None]


def parameter_labels(model: Any, depth: int | None) -> dict[Any, str]:
    """The names of the model's parameters, or the first `depth` parts of them."""
    return {p: ".".join(name.split(".")[:depth]) for name, p in named_parameters(model)}
