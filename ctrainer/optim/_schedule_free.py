"""Schedule-free AdamW, RAdam and SGD."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, own

__all__ = ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"]

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

    _counts = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **options: Any):
        if not 0.0 < _momentum(defaults) < 1.0:
            raise ValueError(
                "the momentum, betas[0] in AdamW, must be between 0 and 1, got "
                f"{_momentum(defaults)}"
            )
        super().__init__(params, defaults={**defaults, **_FRESH}, **options)

    @classmethod
    def _state_of(cls, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"z": param.detach().clone(), **super()._state_of(param, group)}

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

    Call train() before training and eval() before evaluating or saving, as a Trainer
    does; step() raises ValueError otherwise. Gradients are read and left alone, where
    the package overwrites them. param_groups count updates: "k", "weight_sum",
    "lr_max", "scheduled_lr".

    Args:
        betas (tuple[float, float], default (0.9, 0.999)): Of the interpolation, in (0,
            1), and of the second moment, in [0, 1).
        weight_decay (float, default 0): Strength of the weight decay at the point where
            gradients are taken, >= 0.

    Raises:
        ValueError: betas[0] is not in (0, 1).

    Source: Defazio et al., "The Road Less Scheduled", 2024; the package schedulefree.

    Example:
        >>> import torch
        >>> from ctrainer.optim import AdamWScheduleFree
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = AdamWScheduleFree(layer.parameters())
        >>> optimizer.train()
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.eval()  # the parameters are the average now
    """

    _kind = "schedule_free_adamw"
    _moments = ("exp_avg_sq",)

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
        super().__init__(**own(locals()))


class RAdamScheduleFree(_ScheduleFree):
    """Schedule-free RAdam, as the package schedulefree has it: the learning rate is
    rectified, which takes the place of a warm-up.

    For train() and eval() see AdamWScheduleFree.

    Args:
        betas (tuple[float, float], default (0.9, 0.999)): Of the interpolation, in (0,
            1), and of the second moment, in [0, 1).
        silent_sgd_phase (bool, default True): Do not move in the first updates, 3 or 4
            with usual betas, where the second moment is too young to adapt the learning
            rate by; else they are SGD's.

    Source: Defazio et al., "The Road Less Scheduled", 2024; Liu et al., "On the
    Variance of the Adaptive Learning Rate and Beyond", 2020; the package schedulefree.

    Example:
        >>> import torch
        >>> from ctrainer.optim import RAdamScheduleFree
        >>> optimizer = RAdamScheduleFree(torch.nn.Linear(3, 2).parameters())
        >>> optimizer.train()
        >>> optimizer.param_groups[0]["train_mode"]
        True
    """

    _kind = "schedule_free_radam"
    _moments = ("exp_avg_sq",)

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
        super().__init__(**own(locals()))


class SGDScheduleFree(_ScheduleFree):
    """Schedule-free SGD, as the package schedulefree has it.

    For train() and eval() see AdamWScheduleFree.

    Args:
        momentum (float, default 0.9): Of the interpolation, in (0, 1).

    Source: Defazio et al., "The Road Less Scheduled", 2024; the package schedulefree.

    Example:
        >>> import torch
        >>> from ctrainer.optim import SGDScheduleFree
        >>> optimizer = SGDScheduleFree(torch.nn.Linear(3, 2).parameters(), lr=0.1)
        >>> optimizer.train()
        >>> optimizer.param_groups[0]["train_mode"]
        True
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
        super().__init__(**own(locals()))
