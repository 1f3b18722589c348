"""Optimizers whose rate is scaled for each parameter by norms: LAMB and LARS."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, count


class LAMB(EngineOptimizer):
    """LAMB, with the options of apex's FusedLAMB.

    Each parameter's AdamW-like direction is scaled by |param| / |direction|, where the
    group has weight decay or use_nvlamb. All gradients of the optimizer together are
    first clipped to max_grad_norm, as apex does; 0 turns that off. adam_w_mode=False
    adds the weight decay to the gradient. state[param] is AdamW's: step, exp_avg and
    exp_avg_sq; apex keeps the step in the group. For 16-bit parameters see Precision.

    Raises:
        ValueError: at the first step, an option out of range.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", 2020.
    """

    _kind = "lamb"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        *,
        maximize: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
            "maximize": maximize,
        }
        super().__init__(params, defaults=defaults, **precision)

    def _new_state(
        self, param: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return zero moments and a count of 0."""
        return {
            "step": count(),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }


class LARS(EngineOptimizer):
    """LARS: SGD whose gradient is scaled for each parameter.

    The gradient with its weight decay is multiplied by
    trust_coefficient * |param| / (|grad| + weight_decay * |param| + eps) before it
    enters the momentum. clip makes that rate an upper bound of lr instead of a factor,
    as apex's LARC does. A parameter whose norm or whose gradient's norm is 0 is updated
    with its gradient alone. trust_coefficient=0 leaves a group to plain SGD, which is
    usual for biases and for the scales of normalisation.
    state[param] is SGD's: momentum_buffer. For 16-bit parameters see Precision.

    Raises:
        ValueError: at the first step, an option out of range.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
    2017.
    """

    _kind = "lars"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        clip: bool = False,
        *,
        maximize: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "clip": clip,
            "maximize": maximize,
        }
        super().__init__(params, defaults=defaults, **precision)

    def _new_state(
        self, param: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return an empty momentum buffer; the first step fills it."""
        return {"momentum_buffer": torch.zeros_like(param)}
