"""Schedule-free AdamW, RAdam and SGD."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, zeros

# What the updates so far have made of a group, before the first one.
_FRESH = {
    "k": 0,
    "train_mode": False,
    "weight_sum": 0.0,
    "lr_max": -1.0,
    "scheduled_lr": 0.0,
}


class _ScheduleFree(EngineOptimizer):
    """train() puts the point where gradients are taken into the parameters, eval() the
    average that the method is about; step() needs the former."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **options: Any):
        if not 0.0 < _momentum(defaults) < 1.0:
            raise ValueError(
                "the momentum, betas[0] in AdamW, must be between 0 and 1, got "
                f"{_momentum(defaults)}"
            )
        super().__init__(params, defaults={**defaults, **_FRESH}, **options)

    def train(self) -> None:
        """Make the parameters the point at which gradients are taken."""
        self._engine.check_idle("train()")
        for group in self.param_groups:
            if not group["train_mode"]:
                self._move(group, 1 - _momentum(group))
            group["train_mode"] = True

    def eval(self) -> None:
        """Make the parameters the average of the iterates."""
        self._engine.check_idle("eval()")
        for group in self.param_groups:
            if group["train_mode"]:
                self._move(group, 1 - 1 / _momentum(group))
            group["train_mode"] = False

    @torch.no_grad()
    def _move(self, group: dict[str, Any], weight: float) -> None:
        """Interpolate from the group's parameters towards "z"."""
        moved = [p for p in group["params"] if "z" in self.state.get(p, ())]
        if not moved:
            return
        states = [self.state[p] for p in moved]
        points = [s.get("master_param", p) for s, p in zip(states, moved, strict=True)]
        ends = [s["z"].to(q.dtype) for s, q in zip(states, points, strict=True)]
        torch._foreach_lerp_(points, ends, weight)
        copies = [(p, q) for p, q in zip(moved, points, strict=True) if p is not q]
        for param, master in copies:
            param.copy_(master)


def _momentum(group: dict[str, Any]) -> float:
    return float(group["momentum"] if "momentum" in group else group["betas"][0])


class AdamWScheduleFree(_ScheduleFree):
    """Schedule-free AdamW, as the package schedulefree has it.

    params: parameters, or dicts of them with options of their own.
    lr: >= 0. betas: of the interpolation, in (0, 1), and of the second moment, in
        [0, 1). eps: >= 0. weight_decay: >= 0, of the point where gradients are taken.
    warmup_steps: >= 0: the rate grows linearly over so many updates.
    r, weight_lr_power: >= 0: update k weighs k**r * (largest rate)**weight_lr_power in
        the average.
    foreach is accepted and changes nothing. For 16-bit parameters see Precision.

    Call train() before training and eval() before evaluating or saving, as a Trainer
    does; step() raises ValueError otherwise. Gradients are read and left alone, where
    the package overwrites them. param_groups count updates: "k", "weight_sum",
    "lr_max", "scheduled_lr".

    Source: Defazio et al., "The Road Less Scheduled", 2024; the package schedulefree.
    """

    _kind = "schedule_free_adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        warmup_steps: float = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool | None = True,
        **precision: Unpack[Precision],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "r": r,
            "warmup_steps": warmup_steps,
            "weight_lr_power": weight_lr_power,
            "weight_decay": weight_decay,
            "foreach": foreach,
        }
        super().__init__(params, defaults, **precision)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"z": param.detach().clone(), "exp_avg_sq": zeros(param)}


class RAdamScheduleFree(_ScheduleFree):
    """Schedule-free RAdam, as the package schedulefree has it: the rate is rectified,
    which takes the place of a warm-up.

    silent_sgd_phase: do not move in the first updates, 3 or 4 with usual betas, where
        the second moment is too young to adapt the rate by; else they are SGD's.
    The other arguments, and train() and eval(), are those of AdamWScheduleFree.

    Source: Defazio et al., "The Road Less Scheduled", 2024; Liu et al., "On the
    Variance of the Adaptive Learning Rate and Beyond", 2020; the package schedulefree.
    """

    _kind = "schedule_free_radam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool | None = True,
        silent_sgd_phase: bool = True,
        **precision: Unpack[Precision],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "r": r,
            "weight_lr_power": weight_lr_power,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "silent_sgd_phase": silent_sgd_phase,
        }
        super().__init__(params, defaults, **precision)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"z": param.detach().clone(), "exp_avg_sq": zeros(param)}


class SGDScheduleFree(_ScheduleFree):
    """Schedule-free SGD, as the package schedulefree has it.

    momentum: of the interpolation, in (0, 1). The other arguments, and train() and
    eval(), are those of AdamWScheduleFree.

    Source: Defazio et al., "The Road Less Scheduled", 2024; the package schedulefree.
    """

    _kind = "schedule_free_sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0,
        warmup_steps: float = 0,
        r: float = 0.0,
        weight_lr_power: float = 2,
        foreach: bool | None = True,
        **precision: Unpack[Precision],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "r": r,
            "warmup_steps": warmup_steps,
            "weight_lr_power": weight_lr_power,
            "weight_decay": weight_decay,
            "foreach": foreach,
        }
        super().__init__(params, defaults, **precision)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"z": param.detach().clone()}
