"""AdamW and SGD with torch.optim's interface on ctrainer's engine.

`step` clips, updates and zeroes the gradients in one call of C. State is kept in
torch's own layout, so state_dict() loads into torch.optim's optimizer of the same name
and the other way round. Parameters live on the CPU; on a GPU use torch.optim's with
fused=True.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from ctrainer._C import LRScheduler, OptimEngine

__all__ = ["SGD", "AdamW", "LRScheduler", "get_scheduler"]

NATIVE_SCHEDULES = ("constant", "constant_with_warmup", "cosine", "linear")


def _refuse(**options: bool) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(
                f"{name}=True: this optimizer does not have it; leave it out, or use "
                "torch.optim"
            )


class _Face(torch.optim.Optimizer):
    """What both faces share; a mixin in front of torch's class of the same name."""

    _kind: Literal["adamw", "sgd"]
    _native_step = True  # step() is ours, so the trainer may call the engine itself

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._native_step = inspect.unwrap(cls.step) is _Face.step

    def __init__(self, params: ParamsT, **options: Any) -> None:
        self._engine = OptimEngine(self._kind)
        super().__init__(params, **options)
        # torch.amp.GradScaler would leave unscaling to a fused step.
        self._step_supports_amp_scaling = False

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        zero_grads: bool = False,
        loss_scale: float = 1.0,
        nonfinite: Literal["keep", "skip", "stop"] = "keep",
    ) -> Any:
        """Clip, update and zero the gradients; return the closure's loss, or None.

        max_norm clips the gradients, after division by loss_scale, to that L2 norm.
        zero_grads writes zeros over them in the same pass. nonfinite says what happens
        when one is Inf or NaN: "keep" updates all the same, as torch does; "skip"
        changes nothing; "stop" raises.

        Raises:
            FloatingPointError: nonfinite is "stop" and a gradient is not finite.
            ValueError, TypeError: a parameter or gradient that cannot be read; the
                message says which, and nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.step(self, max_norm, loss_scale, nonfinite, zero_grads)
        return loss

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the gradients at the last step, before clipping; None where
        neither max_norm nor nonfinite asked for it."""
        return self._engine.grad_norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does, unless another thread is in step()."""
        self._engine.check_idle("add_param_group()")
        # Past torch's guard against tracing, which imports torch._dynamo (1 s).
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own dict of state and groups."""
        made: dict[str, Any] = inspect.unwrap(torch.optim.Optimizer.state_dict)(self)
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() of this class or of torch's gave."""
        self._engine.check_idle("load_state_dict()")
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_engine" in self.__dict__:
            self._engine.check_idle("__setstate__()")
        else:
            self._engine = OptimEngine(self._kind)
        super().__setstate__(state)
        self._step_supports_amp_scaling = False


class AdamW(_Face, torch.optim.AdamW):
    """AdamW, as torch.optim.AdamW.

    foreach and fused are accepted and change nothing: there is one implementation.
    amsgrad, capturable and differentiable are refused.

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
    ) -> None:
        _refuse(amsgrad=amsgrad, capturable=capturable, differentiable=differentiable)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )

    def _new_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what torch.optim.AdamW keeps for a parameter before its first step."""
        return {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }


class SGD(_Face, torch.optim.SGD):
    """Stochastic gradient descent with momentum, as torch.optim.SGD.

    foreach and fused are accepted and change nothing: there is one implementation.
    differentiable is refused.

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
    ) -> None:
        _refuse(differentiable=differentiable)
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
        )

    def _new_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return an empty momentum buffer; the first step fills it."""
        return {"momentum_buffer": torch.zeros_like(param)}


def get_scheduler(
    name: str,
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return a learning-rate scheduler, as transformers.get_scheduler does.

    "constant", "constant_with_warmup", "linear" and "cosine" are ours; any other name
    is made by transformers, which then has to be installed.

    Raises:
        ValueError: a number of steps that the schedule needs is missing.
    """
    name = str(getattr(name, "value", name))
    options = dict(scheduler_specific_kwargs or {})
    if name not in NATIVE_SCHEDULES or options.keys() - {"num_cycles", "last_epoch"}:
        import transformers

        return transformers.get_scheduler(
            name, optimizer, num_warmup_steps, num_training_steps, options
        )
    if name != "constant" and num_warmup_steps is None:
        raise ValueError(f"{name} needs num_warmup_steps; got None")
    if name in ("linear", "cosine") and num_training_steps is None:
        raise ValueError(f"{name} needs num_training_steps; got None")
    return LRScheduler(
        optimizer, name, num_warmup_steps or 0, num_training_steps or 0, **options
    )
