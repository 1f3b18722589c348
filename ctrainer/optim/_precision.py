"""What every optimizer can do about bf16 and fp16 parameters."""

from __future__ import annotations

import itertools
from typing import Any, TypedDict

import torch

__all__ = ["Precision"]


class Precision(TypedDict, total=False):
    """Options that every optimizer here has, for bfloat16 and float16 parameters.

    They may differ by group; parameters of another dtype are not touched by them.

    Args:
        master_weights (bool, default False): Update a float32 copy,
            state["master_param"], and round it into the parameter. The state is
            float32. Call sync_master_weights() after changing parameters by other
            means.
        fp32_state (bool, default False): Keep the state in float32, and round the
            parameter itself at each step.
        stochastic_rounding (bool, default False): Round bfloat16 parameters up or down
            at random, in proportion to what bfloat16 cannot hold, so that small updates
            are right on average. float16 is rejected.
        rounding_seed (int, default 0): In [0, 2**64): of the random bits. They are a
            function of it, of the group's "rounding_step", which each update counts,
            and of a parameter's place, so a run that is resumed from state_dict()
            rounds as one that was not stopped.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015
    (stochastic_rounding).

    Example:
        >>> import torch
        >>> from ctrainer.optim import AdamW
        >>> layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        >>> optimizer = AdamW(layer.parameters(), master_weights=True)
        >>> optimizer.param_groups[0]["master_weights"]
        True
    """

    master_weights: bool
    fp32_state: bool
    stochastic_rounding: bool
    rounding_seed: int


def new_master(param: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy of a parameter, of its shape and order."""
    master: Any = param.detach().to(torch.float32, copy=True)
    if hasattr(param, "_part"):
        master._part = param._part
    return master  # type: ignore[no-any-return]


def keep_float32(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load float32 state of bf16 and fp16 parameters again, which torch has rounded."""
    numbers = itertools.chain.from_iterable(g["params"] for g in saved["param_groups"])
    ours = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
    for number, param in zip(numbers, ours, strict=True):
        half = param.dtype in (torch.bfloat16, torch.float16)
        if not half or param not in optimizer.state:
            continue
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                copy = value.detach().to(param.device, copy=True)
                optimizer.state[param][name] = copy


def keep_as_saved(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load quantized state again, which torch has cast to the parameters' dtype."""
    numbers = (n for group in saved["param_groups"] for n in group["params"])
    ours = (p for group in optimizer.param_groups for p in group["params"])
    for number, param in zip(numbers, ours, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor):
                copy = value.detach().to(param.device, copy=not name.startswith("qmap"))
                optimizer.state[param][name] = copy
