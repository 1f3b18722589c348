"""Optimizers with one moment: SGD and Lion."""

from __future__ import annotations

from typing import Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, given, own

__all__ = ["SGD", "Lion"]


class SGD(EngineOptimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum, as torch.optim.SGD.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep
    learning", 2013, in torch's form.
    """

    _kind = "sgd"
    _counts = False
    _moments = ("momentum_buffer if momentum",)

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
        super().__init__(**given(locals()))


class Lion(EngineOptimizer):
    """Lion: each element moves by lr in the direction of its momentum's sign.

    state[param] is "exp_avg" alone, as in the authors' and in lion-pytorch's class,
    whose state_dict() loads here and the other way round.

    Args:
        lr (float | torch.Tensor, default 0.0001): Learning rate, >= 0. The paper takes
            3 to 10 times less than for AdamW, and as much more weight_decay.
        betas (tuple[float, float], default (0.9, 0.99)): Decays of the direction, and
            of the momentum that is kept, in [0, 1).
        weight_decay (float, default 0.0): A step shrinks the parameter by lr *
            weight_decay; >= 0.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023,
    algorithm 2.
    """

    _kind = "lion"
    _counts = False
    _moments = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**own(locals()))
