"""Adam and its kin."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, count, reject, zeros

Betas = tuple[float | torch.Tensor, float | torch.Tensor]


class _Adam(EngineOptimizer):
    """State that every form of Adam keeps."""

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = {"step": count(), "exp_avg": zeros(param), "exp_avg_sq": zeros(param)}
        if group.get("amsgrad"):
            state["max_exp_avg_sq"] = zeros(param)
        return state


class Adam(_Adam, torch.optim.Adam):
    """Adam, as torch.optim.Adam: the weight decay is added to the gradient, unless
    decoupled_weight_decay asks for AdamW's.

    foreach and fused are accepted and change nothing: there is one implementation.
    capturable and differentiable are rejected. For 16-bit parameters see Precision.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015; amsgrad:
    Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", 2018.
    """

    _kind = "adam"

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
        reject(capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            **precision,
        )


class AdamW(_Adam, torch.optim.AdamW):
    """AdamW, as torch.optim.AdamW.

    foreach and fused are accepted and change nothing: there is one implementation.
    capturable and differentiable are rejected. For 16-bit parameters see Precision.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    _kind = "adamw"

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
        reject(capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            **precision,
        )


class RAdam(_Adam, torch.optim.RAdam):
    """RAdam, as torch.optim.RAdam.

    foreach is accepted and changes nothing; capturable and differentiable are rejected.
    For 16-bit parameters see Precision.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and
    Beyond", 2020.
    """

    _kind = "radam"

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
        reject(capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            **precision,
        )


class NAdam(EngineOptimizer, torch.optim.NAdam):
    """NAdam, as torch.optim.NAdam.

    momentum_decay: >= 0: the momentum of step t is
        betas[0] * (1 - 0.96**(t * momentum_decay) / 2); state[param]["mu_product"] is
        the product of all so far, a float32.

    foreach is accepted and changes nothing; capturable and differentiable are rejected.
    For 16-bit parameters see Precision.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016.
    """

    _kind = "nadam"

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
        reject(capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum_decay=momentum_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            **precision,
        )

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        one = torch.ones((), dtype=torch.float32, device="cpu")
        moments = {"exp_avg": zeros(param), "exp_avg_sq": zeros(param)}
        return {"step": count(), "mu_product": one, **moments}


class AdEMAMix(EngineOptimizer):
    """AdEMAMix: AdamW with a second, much slower average of the gradient beside the
    first.

    params: parameters, or dicts of them with options of their own.
    lr: >= 0. eps: >= 0. weight_decay: >= 0, decoupled.
    betas: in [0, 1): of the fast average, the second moment and the slow average.
    alpha: >= 0: the weight of the slow average.
    t_alpha, t_beta3: updates over which alpha grows from 0, and the slow average's
        half-life from the fast one's; None: they are what they are from the start. The
        paper takes the length of the run for both.

    state[param] is "step", "exp_avg_fast", "exp_avg_slow" and "exp_avg_sq", as in the
    authors' class. For 16-bit parameters see Precision.

    Source: Pagliardini, Ablin and Grangier, "The AdEMAMix Optimizer: Better, Faster,
    Older", 2024, algorithm 1.
    """

    _kind = "ademamix"

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "alpha": alpha,
            "t_alpha": t_alpha,
            "t_beta3": t_beta3,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults=defaults, **precision)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        names = ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")
        return {"step": count(), **{name: zeros(param) for name in names}}


class Adamax(EngineOptimizer, torch.optim.Adamax):
    """Adamax, as torch.optim.Adamax.

    foreach is accepted and changes nothing; capturable and differentiable are rejected.
    For 16-bit parameters see Precision.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015,
    section 7.
    """

    _kind = "adamax"

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
        reject(capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            foreach=foreach,
            maximize=maximize,
            **precision,
        )

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": count(), "exp_avg": zeros(param), "exp_inf": zeros(param)}
