"""Optimizers that scale each parameter's learning rate by norms: LAMB and LARS."""

from __future__ import annotations

from typing import Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, own

__all__ = ["LAMB", "LARS"]


class LAMB(EngineOptimizer):
    """LAMB, with the options of apex's FusedLAMB.

    Each parameter's AdamW-like direction is scaled by |param| / |direction|.
    state[param] is AdamW's: step, exp_avg and exp_avg_sq; apex keeps the step in the
    group.

    Args:
        adam_w_mode (bool, default True): Decouple the weight decay; False adds it to
            the gradient.
        grad_averaging (bool, default True): The gradient enters its mean times 1 -
            betas[0].
        max_grad_norm (float, default 1.0): All gradients of the optimizer together are
            first clipped to this norm, as apex does; 0 turns that off.
        use_nvlamb (bool, default False): Scale the direction of groups without weight
            decay, too.

    Raises:
        ValueError: at the first step, an option out of range.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", 2020.
    """

    _kind = "lamb"
    _moments = ("exp_avg", "exp_avg_sq")

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
        super().__init__(**own(locals()))


class LARS(EngineOptimizer):
    """LARS: SGD whose gradient is scaled for each parameter.

    The gradient with its weight decay is multiplied by trust_coefficient * |param| /
    (|grad| + weight_decay * |param| + eps) before it enters the momentum. A parameter
    whose norm or whose gradient's norm is 0 is updated with its gradient alone.
    state[param] is SGD's: momentum_buffer.

    Args:
        trust_coefficient (float, default 0.001): Factor of the scale; 0 leaves a group
            to plain SGD, which is usual for biases and for the scales of normalisation.
        eps (float, default 1e-08): Added to the divisor of the scale, >= 0.
        clip (bool, default False): Make the scale an upper bound of lr instead of a
            factor, as apex's LARC does.

    Raises:
        ValueError: at the first step, an option out of range.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
    2017.
    """

    _kind = "lars"
    _counts = False
    _moments = ("momentum_buffer",)

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
        super().__init__(**own(locals()))
