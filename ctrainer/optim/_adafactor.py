"""Adafactor."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, own, shape_of

__all__ = ["Adafactor"]


class Adafactor(EngineOptimizer):
    """Adafactor, with the options, defaults and state of transformers' and fairseq's.

    Where a parameter has two dimensions or more its second moment is kept as averages
    by row and by column of the last two. state[param] holds step (an int), RMS,
    exp_avg_sq_row and exp_avg_sq_col or exp_avg_sq, and exp_avg where beta1 is not
    None; state_dict() loads into transformers.Adafactor and back.

    Where scale_parameter is set without relative_step, fairseq writes the scaled
    learning rate back to the group, so that it compounds from parameter to parameter;
    here, as in transformers, each parameter's learning rate is the group's times its
    own scale.

    Args:
        eps (tuple[float, float], default (1e-30, 0.001)): Two numbers: added to the
            squared gradient, and the least root mean square that a parameter counts
            with.
        clip_threshold (float, default 1.0): The largest root mean square of an update.
        decay_rate (float, default -0.8): The second moment decays by 1 -
            step**decay_rate.
        beta1 (float | None, default None): Decay of the mean of gradients; None keeps
            none.
        scale_parameter (bool, default True): Multiply the learning rate by the
            parameter's root mean square.
        relative_step (bool, default True): Take 1 / sqrt(step) for the learning rate,
            at most 0.01; lr has to be None then.
        warmup_init (bool, default False): With relative_step: at most 1e-6 * step, in
            place of 0.01.

    Raises:
        ValueError: lr with relative_step, warmup_init without; at the first step,
            another option out of range, or a parameter that is not in C order.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
    Cost", 2018.

    Example:
        >>> import torch
        >>> from ctrainer.optim import Adafactor
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = Adafactor(layer.parameters())  # sets the learning rate itself
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["exp_avg_sq_row"].shape
        torch.Size([2])
    """

    _kind = "adafactor"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        if lr is not None and relative_step:
            raise ValueError(
                f"lr={lr!r} with relative_step=True: leave one of them out, since a "
                "relative step has a learning rate of its own"
            )
        if warmup_init and not relative_step:
            raise ValueError("warmup_init=True needs relative_step=True")
        super().__init__(**own(locals()))

    @classmethod
    def _state_of(cls, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return what transformers' keeps before a parameter's first step; state of
        bf16 and fp16 parameters is float32."""
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        here = param.device
        state: dict[str, Any] = {"step": 0}
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(param, dtype=wide)
        shape = shape_of(param)
        if len(shape) >= 2:
            by_column = shape[:-2] + shape[-1:]
            state["exp_avg_sq_row"] = torch.zeros(shape[:-1], dtype=wide, device=here)
            state["exp_avg_sq_col"] = torch.zeros(by_column, dtype=wide, device=here)
        else:
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=wide)
        state["RMS"] = torch.zeros((), dtype=wide, device=here)
        return state
