"""Adam and its kin."""

from __future__ import annotations

import inspect
from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, given, own

__all__ = ["AdEMAMix", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"]

Betas = tuple[float | torch.Tensor, float | torch.Tensor]


class Adam(EngineOptimizer, torch.optim.Adam):
    """Adam, as torch.optim.Adam: the weight decay is added to the gradient, unless
    decoupled_weight_decay asks for AdamW's.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015; amsgrad:
    Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", 2018.
    """

    _kind = "adam"
    _moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq if amsgrad")
    # torch 2.6 has it for the others alone.
    _unknown_to_torch = frozenset(
        {"decoupled_weight_decay"}
        - inspect.signature(torch.optim.Adam).parameters.keys()
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**given(locals()))


class AdamW(EngineOptimizer, torch.optim.AdamW):
    """AdamW, as torch.optim.AdamW.

    Args:
        weight_decay (float, default 0.01): A step shrinks the parameter by lr *
            weight_decay; >= 0.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    _kind = "adamw"
    _moments = Adam._moments

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**given(locals()))


class RAdam(EngineOptimizer, torch.optim.RAdam):
    """RAdam, as torch.optim.RAdam.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond",
    2020.
    """

    _kind = "radam"
    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**given(locals()))


class NAdam(EngineOptimizer, torch.optim.NAdam):
    """NAdam, as torch.optim.NAdam.

    Args:
        momentum_decay (float, default 0.004): >= 0: the momentum of step t is betas[0]
            * (1 - 0.96**(t * momentum_decay) / 2); state[param]["mu_product"] is the
            product of all so far, a float32.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016.
    """

    _kind = "nadam"
    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**given(locals()))

    @classmethod
    def _state_of(cls, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        one = torch.ones((), dtype=torch.float32, device="cpu")
        made = super()._state_of(param, group)
        return {"step": made.pop("step"), "mu_product": one, **made}  # in torch's order


class AdEMAMix(EngineOptimizer):
    """AdEMAMix: AdamW with a second, much slower average of the gradient beside the
    first.

    state[param] is "step", "exp_avg_fast", "exp_avg_slow" and "exp_avg_sq", as in the
    authors' class.

    Args:
        betas (tuple[float, float, float], default (0.9, 0.999, 0.9999)): Decays of the
            fast average, of the second moment and of the slow average, in [0, 1).
        weight_decay (float, default 0.01): A step shrinks the parameter by lr *
            weight_decay; >= 0.

    Source: Pagliardini, Ablin and Grangier, "The AdEMAMix Optimizer: Better, Faster,
    Older", 2024, algorithm 1.
    """

    _kind = "ademamix"
    _moments = ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: float | None = None,
        t_beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**own(locals()))


class Adamax(EngineOptimizer, torch.optim.Adamax):
    """Adamax, as torch.optim.Adamax.

    Args:
        betas (tuple[float, float], default (0.9, 0.999)): Decays of the mean of
            gradients and of the infinity norm, in [0, 1).
        eps (float, default 1e-08): Added to the norm, >= 0.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, section
    7.
    """

    _kind = "adamax"
    _moments = ("exp_avg", "exp_inf")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**given(locals()))
