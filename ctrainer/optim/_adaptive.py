"""Optimizers that adapt each element's learning rate: Adagrad, Adadelta, RMSprop."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, count, given, zeros

__all__ = ["Adadelta", "Adagrad", "RMSprop"]


class Adagrad(EngineOptimizer, torch.optim.Adagrad):
    """Adagrad, as torch.optim.Adagrad, but for one thing: a group's own
    initial_accumulator_value counts, which torch's constructor ignores.

    The state of the parameters given to the constructor is made there, as torch does;
    that of later ones, of groups whose first sum is their own, and of bf16 and fp16
    parameters whose state is float32, at their first step.

    Args:
        lr_decay (float, default 0): Update t has the learning rate lr / (1 + (t - 1) *
            lr_decay); >= 0.
        initial_accumulator_value (float, default 0): Where the sum of squared gradients
            starts, >= 0.
        eps (float, default 1e-10): Added to the root of the sum of squares, >= 0.

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
        super().__init__(**given(locals()))
        for group in self.param_groups:
            first = group["initial_accumulator_value"]
            wide = group.get("master_weights") or group.get("fp32_state")
            late = wide or first != initial_accumulator_value
            for param in group["params"]:
                made = self.state.pop(param)
                if not late:  # torch's count is on its default device
                    self.state[param] = {**made, "step": count()}

    @classmethod
    def _state_of(cls, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        first = group["initial_accumulator_value"]
        return {"step": count(), "sum": zeros(param).fill_(first)}


class Adadelta(EngineOptimizer, torch.optim.Adadelta):
    """Adadelta, as torch.optim.Adadelta.

    Args:
        rho (float, default 0.9): Decay of the means of squared gradients and of squared
            updates, in [0, 1].
        eps (float, default 1e-06): Added to both means under their roots, >= 0.

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.
    """

    _kind = "adadelta"
    _moments = ("square_avg", "acc_delta")

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
        super().__init__(**given(locals()))


class RMSprop(EngineOptimizer, torch.optim.RMSprop):
    """RMSprop, as torch.optim.RMSprop, but for one thing: where rounding makes the
    centred variance negative it counts as 0, while torch's parameter becomes NaN.

    Args:
        alpha (float, default 0.99): Decay of the mean of squared gradients, >= 0.
        centered (bool, default False): Divide by the variance: subtract the squared
            mean of gradients.

    Source: Hinton, "Neural Networks for Machine Learning", 2012, lecture 6; the centred
    form: Graves, "Generating Sequences With Recurrent Neural Networks", 2013.
    """

    _kind = "rmsprop"
    _moments = ("square_avg", "momentum_buffer if momentum", "grad_avg if centered")

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
        super().__init__(**given(locals()))
