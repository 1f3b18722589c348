"""fairseq's own optimizers, which differ from torch's of the same names."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._adam import Adam, Adamax
from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, count, own

__all__ = ["FairseqAdam", "FairseqAdamax", "FairseqNAG"]


class _Fairseq(EngineOptimizer):
    """State of bf16 and fp16 parameters is float32 unless fp32_state=False, and the
    count of steps in a state_dict() is an int, as in fairseq's checkpoints."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **{"fp32_state": True, **options})

    def state_dict(self) -> dict[str, Any]:
        """Return the dict of state and groups as fairseq's class has it."""
        made = super().state_dict()
        made["state"] = {k: _with_int_step(v) for k, v in made["state"].items()}
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entry in self.state.values():
            if "step" in entry and not isinstance(entry["step"], torch.Tensor):
                entry["step"] = count().fill_(entry["step"])


def _with_int_step(state: dict[str, Any]) -> dict[str, Any]:
    return {k: int(v) if k == "step" else v for k, v in state.items()}


class FairseqAdam(_Fairseq):
    """Adam as fairseq has it: weight decay is decoupled, and eps is added to the root
    of the second moment before that is corrected for its bias.

    Args:
        precision (Unpack[Precision]): As for all optimizers, see Precision; here
            fp32_state is True by default.

    Source: fairseq, optim/adam.py, class Adam.
    """

    _kind = "fairseq_adam"
    _moments = Adam._moments

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**own(locals()))


class FairseqAdamax(_Fairseq):
    """Adamax as fairseq has it: weight decay is decoupled, eps is added to the norm.

    Args:
        betas (tuple[float, float], default (0.9, 0.999)): Decays of the mean of
            gradients and of the infinity norm, in [0, 1).
        eps (float, default 1e-08): Added to the norm, >= 0.
        bias_correction (bool, default True): Divide the learning rate by 1 -
            betas[0]**step.
        precision (Unpack[Precision]): As for all optimizers, see Precision; here
            fp32_state is True by default.

    Source: fairseq, optim/adamax.py, class Adamax.
    """

    _kind = "fairseq_adamax"
    _moments = Adamax._moments

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        bias_correction: bool = True,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**own(locals()))


class FairseqNAG(_Fairseq):
    """Nesterov's accelerated gradient as fairseq has it: the momentum is a sum of
    updates, which a change of the learning rate rescales by lr / lr_old.

    Each update writes its learning rate to "lr_old" of the group.

    Args:
        weight_decay (float, default 0): A step shrinks the parameter by lr *
            weight_decay; >= 0.
        precision (Unpack[Precision]): As for all optimizers, see Precision; here
            fp32_state is True by default.

    Source: fairseq, optim/nag.py, class NAG; Bengio, Boulanger-Lewandowski and Pascanu,
    "Advances in Optimizing Recurrent Networks", 2013, equations 6 and 7.
    """

    _kind = "nag"
    _counts = False
    _moments = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        **precision: Unpack[Precision],
    ) -> None:
        lr_old = lr
        super().__init__(**own(locals()))
