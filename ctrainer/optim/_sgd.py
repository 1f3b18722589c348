"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, reject, zeros


class SGD(EngineOptimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum, as torch.optim.SGD.

    foreach and fused are accepted and change nothing: there is one implementation.
    differentiable is rejected. For 16-bit parameters see Precision.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep
    learning", 2013, in torch's form.
    """

    _kind = "sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **precision: Unpack[Precision],
    ) -> None:
        reject(differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            **precision,
        )

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return an empty momentum buffer; the first step fills it."""
        return {"momentum_buffer": zeros(param)}
