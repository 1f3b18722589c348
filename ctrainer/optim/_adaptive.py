"""Optimizers that adapt each element's rate: Adagrad, Adadelta, RMSprop."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, count, reject, zeros


class Adagrad(EngineOptimizer, torch.optim.Adagrad):
    """Adagrad, as torch.optim.Adagrad, but for one thing: a group's own
    initial_accumulator_value counts, which torch's constructor passes over.

    The state of the parameters given to the constructor is made there, as torch does;
    that of later ones, of groups whose first sum is their own, and of 16-bit parameters
    whose state is float32, at their first step.
    foreach and fused are accepted and change nothing; differentiable is rejected. For
    16-bit parameters see Precision.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization", 2011.
    """

    _kind = "adagrad"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **precision: Unpack[Precision],
    ) -> None:
        reject(differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            foreach=foreach,
            maximize=maximize,
            fused=fused,
            **precision,
        )
        for group in self.param_groups:
            first = group["initial_accumulator_value"]
            wide = group.get("master_weights") or group.get("fp32_state")
            late = wide or first != initial_accumulator_value
            for param in group["params"]:
                made = self.state.pop(param)
                if not late:  # torch's count is on its default device
                    self.state[param] = {**made, "step": count()}

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        first = group["initial_accumulator_value"]
        return {"step": count(), "sum": zeros(param).fill_(first)}


class Adadelta(EngineOptimizer, torch.optim.Adadelta):
    """Adadelta, as torch.optim.Adadelta.

    foreach is accepted and changes nothing; capturable and differentiable are rejected.
    For 16-bit parameters see Precision.

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.
    """

    _kind = "adadelta"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        reject(capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            rho=rho,
            eps=eps,
            weight_decay=weight_decay,
            foreach=foreach,
            maximize=maximize,
            **precision,
        )

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": count(), "square_avg": zeros(param), "acc_delta": zeros(param)}


class RMSprop(EngineOptimizer, torch.optim.RMSprop):
    """RMSprop, as torch.optim.RMSprop, but for one thing: where rounding makes the
    centred variance negative it counts as 0, while torch's parameter becomes NaN.

    foreach is accepted and changes nothing; capturable and differentiable are rejected.
    For 16-bit parameters see Precision.

    Source: Hinton, "Neural Networks for Machine Learning", 2012, lecture 6; the centred
    form: Graves, "Generating Sequences With Recurrent Neural Networks", 2013.
    """

    _kind = "rmsprop"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        reject(capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
            foreach=foreach,
            maximize=maximize,
            **precision,
        )

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = {"step": count(), "square_avg": zeros(param)}
        if group["momentum"] > 0:
            state["momentum_buffer"] = zeros(param)
        if group["centered"]:
            state["grad_avg"] = zeros(param)
        return state
