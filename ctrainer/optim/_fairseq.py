"""fairseq's own optimizers, which differ from torch's of the same names."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, count, zeros


class _Fairseq(EngineOptimizer):
    """State of 16-bit parameters is float32 unless fp32_state=False, and the count of
    steps in a state_dict() is an int, as in fairseq's checkpoints."""

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

    params: parameters, or dicts of them with options of their own.
    lr: >= 0. betas: in [0, 1). eps: >= 0. weight_decay: >= 0.
    amsgrad: divide by the largest second moment so far.
    For 16-bit parameters see Precision; here fp32_state is True by default.

    Source: fairseq, optim/adam.py, class Adam.
    """

    _kind = "fairseq_adam"

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
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults={**options, "amsgrad": amsgrad}, **precision)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = {"step": count(), "exp_avg": zeros(param), "exp_avg_sq": zeros(param)}
        if group.get("amsgrad"):
            state["max_exp_avg_sq"] = zeros(param)
        return state


class FairseqAdamax(_Fairseq):
    """Adamax as fairseq has it: weight decay is decoupled, eps is added to the norm.

    params: parameters, or dicts of them with options of their own.
    lr: >= 0. betas: in [0, 1). eps: >= 0. weight_decay: >= 0.
    bias_correction: divide the rate by 1 - betas[0]**step.
    For 16-bit parameters see Precision; here fp32_state is True by default.

    Source: fairseq, optim/adamax.py, class Adamax.
    """

    _kind = "fairseq_adamax"

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
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults={**options, "bias_correction": bias_correction},
            **precision,
        )

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": count(), "exp_avg": zeros(param), "exp_inf": zeros(param)}


class FairseqNAG(_Fairseq):
    """Nesterov's accelerated gradient as fairseq has it: the momentum is a sum of
    updates, which a change of the rate rescales by lr / lr_old.

    params: parameters, or dicts of them with options of their own.
    lr: >= 0. momentum: >= 0. weight_decay: >= 0, decoupled.
    Each update writes its rate to "lr_old" of the group.
    For 16-bit parameters see Precision; here fp32_state is True by default.

    Source: fairseq, optim/nag.py, class NAG.
    """

    _kind = "nag"

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        **precision: Unpack[Precision],
    ) -> None:
        options = {"lr": lr, "lr_old": lr, "momentum": momentum}
        super().__init__(
            params, defaults={**options, "weight_decay": weight_decay}, **precision
        )

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": zeros(param)}
