"""Which modules of a Trainer's model become units."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ctrainer.arguments.fsdp import Sharding

logger = logging.getLogger("ctrainer.trainer")


def choose(model: nn.Module, sharding: Sharding) -> set[int]:
    """The ids of the modules below `model` that become units.

    By the names of their classes, or by the number of their parameters. Never one that
    shares a parameter with a module outside of it, of which both would have a part.

    Raises ValueError for the name of a class of which the model has no module.
    """
    if not sharding.wraps:
        return set()
    if sharding.min_num_params is not None:
        chosen = _by_size(model, sharding.min_num_params)
    else:
        chosen = _by_class(model, sharding.layers)
    places = _places(model)
    return {
        id(module)
        for module in chosen
        if not isinstance(module, nn.ModuleList | nn.ModuleDict)
        and all(places[p] == n for p, n in _places(module).items())
    }


def _by_class(model: nn.Module, layers: tuple[str, ...] | None) -> list[nn.Module]:
    names = set(layers or getattr(model, "_no_split_modules", None) or ())
    found = [m for m in _below(model) if type(m).__name__ in names]
    missing = names - {type(m).__name__ for m in found}
    if layers and missing:
        there = sorted({type(m).__name__ for m in _below(model)})
        raise ValueError(
            f"fsdp_config: transformer_layer_cls_to_wrap names {sorted(missing)}, of "
            f"which the model has no module; its classes are {', '.join(there)}"
        )
    if not found:
        logger.warning(
            "The model tells no classes of layers (_no_split_modules): it becomes one "
            "unit, gathered whole. Set transformer_layer_cls_to_wrap or min_num_params "
            "in fsdp_config."
        )
    return found


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """The innermost modules first: what is in a unit does not count for those around.
    Attention of torch reads the weights of what is below it, which stay with it.
    """
    found: list[nn.Module] = []
    if least > 0:
        for child in model.children():
            _add_large(child, least, found)
    return found


def _add_large(module: nn.Module, least: int, found: list[nn.Module]) -> int:
    """Append the units at and below the module; how many parameters are in them."""
    inside = 0
    if not isinstance(module, nn.MultiheadAttention):
        inside = sum(_add_large(child, least, found) for child in module.children())
    count = sum(p.numel() for p in module.parameters())
    if count - inside >= least:
        found.append(module)
        return count
    return inside


def _below(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module is not model]


def _places(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places of modules each parameter is."""
    return Counter(
        parameter
        for below in module.modules()
        for parameter in below._parameters.values()
        if parameter is not None
    )


def recompute(model: nn.Module, chosen: set[int]) -> None:
    """Let the chosen modules keep their inputs instead of their activations."""
    from ctrainer.compat.fairscale import checkpoint_wrapper

    for module in model.modules():
        if id(module) in chosen:
            checkpoint_wrapper(module)
