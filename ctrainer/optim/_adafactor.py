"""Adafactor."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, shape_of


class Adafactor(EngineOptimizer):
    """Adafactor, with the options, defaults and state of transformers' and fairseq's.

    Where a parameter has two dimensions or more its second moment is kept as averages
    by row and by column of the last two. state[param] holds step (an int), RMS,
    exp_avg_sq_row and exp_avg_sq_col or exp_avg_sq, and exp_avg where beta1 is not
    None; state_dict() loads into transformers.Adafactor and back.

    eps: two numbers, added to the squared gradient and the least root mean square that
        a parameter counts with. clip_threshold: the root mean square that an update may
        have. decay_rate: the second moment decays by 1 - step**decay_rate.
    scale_parameter: multiply the rate by the parameter's root mean square.
    relative_step: take 1 / sqrt(step) for the rate, at most 0.01 or, with warmup_init,
        1e-6 * step; lr has to be None then.

    Where scale_parameter is set without relative_step, fairseq writes the scaled rate
    back to the group, so that it compounds from parameter to parameter; here, as in
    transformers, each parameter's rate is the group's times its own scale.

    Raises:
        ValueError: lr with relative_step, warmup_init without; at the first step,
            another option out of range, or a parameter that is not in C order.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
    Cost", 2018.
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
                "relative step has a rate of its own"
            )
        if warmup_init and not relative_step:
            raise ValueError("warmup_init=True needs relative_step=True")
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults=defaults, **precision)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return what transformers' keeps before a parameter's first step; state of
        16-bit parameters is float32."""
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        state: dict[str, Any] = {"step": 0}
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(param, dtype=wide)
        shape = shape_of(param)
        if len(shape) >= 2:
            by_column = shape[:-2] + shape[-1:]
            state["exp_avg_sq_row"] = torch.zeros(shape[:-1], dtype=wide, device="cpu")
            state["exp_avg_sq_col"] = torch.zeros(by_column, dtype=wide, device="cpu")
        else:
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=wide)
        state["RMS"] = torch.zeros((), dtype=wide, device="cpu")
        return state
