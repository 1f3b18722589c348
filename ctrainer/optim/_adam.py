"""Adam and its kin."""

from __future__ import annotations

from typing import Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._face import Face, refuse
from ctrainer.optim._precision import Precision


class AdamW(Face, torch.optim.AdamW):
    """AdamW, as torch.optim.AdamW.

    foreach and fused are accepted and change nothing: there is one implementation.
    amsgrad, capturable and differentiable are refused. For 16-bit parameters see
    Precision.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    _kind = "adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
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
        refuse(amsgrad=amsgrad, capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            **precision,
        )

    def _new_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what torch.optim.AdamW keeps for a parameter before its first step."""
        return {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }
