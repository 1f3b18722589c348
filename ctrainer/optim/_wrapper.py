"""What every optimizer's wrapper shares: torch's protocol, driven by the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch.optim.optimizer import ParamsT

from ctrainer._C import OptimEngine
from ctrainer.optim._precision import Precision, keep_float32, new_master


def reject(**options: bool) -> None:
    """Raise ValueError for an option of torch's that is set and that we lack."""
    for name, value in options.items():
        if value:
            raise ValueError(
                f"{name}=True: this optimizer does not have it; leave it out, or use "
                "torch.optim"
            )


def count() -> torch.Tensor:
    """Return a count of steps as torch keeps it: float32, of no dimension."""
    return torch.tensor(0.0, dtype=torch.float32, device="cpu")


def zeros(param: torch.Tensor) -> torch.Tensor:
    """Return zeros like the parameter, in its order of memory."""
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def shape_of(param: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter, of one that is sharded that of the whole."""
    part = getattr(param, "_part", None)
    return param.shape if part is None else torch.Size(part.shape)


class EngineOptimizer(torch.optim.Optimizer):
    """A mixin in front of torch's class of the same name, or of torch's Optimizer."""

    _kind: str
    _native_step = True  # step() is ours, so the trainer may call the engine itself
    # The options that every wrapper has.
    precision_defaults: ClassVar[Mapping[str, Any]] = {
        "master_weights": False,
        "fp32_state": False,
        "stochastic_rounding": False,
        "rounding_seed": 0,
    }

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._native_step = inspect.unwrap(cls.step) is EngineOptimizer.step

    def __init__(self, params: ParamsT, **options: Any) -> None:
        self._engine = OptimEngine(self._kind)
        names = Precision.__annotations__.keys() & options.keys()
        self._precision = {name: options.pop(name) for name in names}
        super().__init__(params, **options)
        self.defaults.update(self._precision)
        self._fill_in_precision()
        # torch.amp.GradScaler would leave unscaling to a fused step.
        self._step_supports_amp_scaling = False

    def _fill_in_precision(self) -> None:
        """Give groups that came without our options those of the constructor."""
        for group in self.param_groups:
            for name, value in self._precision.items():
                group.setdefault(name, value)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return what the original keeps for `param` before its first step. Called by
        the engine."""
        raise NotImplementedError

    _new_master = staticmethod(new_master)  # called by the engine

    @torch.no_grad()
    def sync_master_weights(self) -> None:
        """Take the parameters, as they are now, for the new master weights."""
        self._engine.check_idle("sync_master_weights()")
        for param, state in self.state.items():
            if "master_param" in state:
                state["master_param"].copy_(param)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        zero_grads: bool = False,
        loss_scale: float = 1.0,
        nonfinite: Literal["keep", "skip", "stop"] = "keep",
        norm_type: float = 2.0,
        clip_value: float | None = None,
        clip_by_group: bool = False,
    ) -> Any:
        """Clip, update and zero the gradients; return the closure's loss, or None.

        max_norm clips the gradients, after division by loss_scale, to that norm of
        the type norm_type (p > 0, inf for the largest element): of all together, or
        with clip_by_group of each group by itself. A group with a "max_grad_norm" is
        clipped to that by its own norm in any case (0: never), and the rest without
        it. clip_value then clips each element to [-clip_value, clip_value], in a pass
        of its own. Equal to torch.nn.utils.clip_grad_norm_ of the parameters that are
        clipped together, then clip_grad_value_. zero_grads writes zeros over them in
        the same pass. nonfinite says what happens when one is Inf or NaN: "keep"
        updates all the same, as torch does; "skip" changes nothing; "stop" raises.

        Raises:
            FloatingPointError: nonfinite is "stop" and a gradient is not finite.
            ValueError, TypeError: a parameter or gradient that cannot be read; the
                message says which, and nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.step(
            self,
            max_norm,
            loss_scale,
            nonfinite,
            zero_grads,
            norm_type,
            clip_value,
            clip_by_group,
        )
        return loss

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients at the last step, of its norm_type, before clipping;
        None where neither max_norm, a group's "max_grad_norm" nor nonfinite asked for
        it."""
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
        self._fill_in_precision()
        keep_float32(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_engine" in self.__dict__:
            self._engine.check_idle("__setstate__()")
        else:
            self._engine = OptimEngine(self._kind)
            self._precision = {}
        super().__setstate__(state)
        self._step_supports_amp_scaling = False
