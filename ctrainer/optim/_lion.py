"""Lion."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, zeros


class Lion(EngineOptimizer):
    """Lion: each element moves by lr in the direction of its momentum's sign.

    params: parameters, or dicts of them with options of their own.
    lr: >= 0. The paper takes 3 to 10 times less than for AdamW, and as much more
        weight_decay.
    betas: in [0, 1): of the direction, and of the momentum that is kept.
    weight_decay: >= 0; decoupled, a step shrinks the parameter by lr * weight_decay.
    maximize: step up the gradient.

    state[param] is "exp_avg" alone, as in the authors' and in lion-pytorch's class,
    whose state_dict() loads here and the other way round. For 16-bit parameters see
    Precision.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023,
    algorithm 2.
    """

    _kind = "lion"

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults=defaults, **precision)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"exp_avg": zeros(param)}
