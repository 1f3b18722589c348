"""Functions of torch that take a rank's shards for whole parameters: the norm of their
gradients and the loss scale would be those of one rank, and ranks would diverge.

torch calls the guarded functions by their names in a module or a class, so that it does
not matter when a script imported clip_grad_norm_ or GradScaler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad


def _are_divided(params: Iterable[Any]) -> bool:
    """Whether ranks have parts of one of them."""
    return any(getattr(param, "_is_divided", False) for param in params)


def _guard(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Let check() see the arguments first, once."""
    guarded = getattr(owner, name)
    if getattr(guarded, "_of_ctrainer", False):
        return

    @functools.wraps(guarded)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return guarded(*args, **kwargs)

    wrapper._of_ctrainer = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def _check_clipping(parameters: Iterable[Any], *args: Any, **kwargs: Any) -> None:
    if _are_divided(parameters):
        raise RuntimeError(
            "torch.nn.utils.clip_grad_norm_() was given sharded parameters, and would "
            "scale each rank's gradients by the norm of its own shards: use "
            "model.clip_grad_norm_(max_norm) of the root, which has the norm over all "
            "ranks"
        )


def _check_scaler(
    scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> None:
    cls = torch.amp.GradScaler
    if type(scaler).unscale_ is not cls.unscale_ or type(scaler).step is not cls.step:
        return  # a subclass may ask the other ranks
    if _are_divided(p for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(
            "torch.amp.GradScaler was given an optimizer of sharded parameters: a rank "
            "whose own shards overflow would leave out an update that the others do. "
            "Use ctrainer.compat.fairscale.ShardedGradScaler, which has the same "
            "methods and asks all ranks"
        )


def install() -> None:
    """Guard torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler."""
    _guard(clip_grad, "_clip_grads_with_norm_", _check_clipping)
    _guard(torch.amp.GradScaler, "_unscale_grads_", _check_scaler)
