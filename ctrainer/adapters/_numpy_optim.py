"""AdamW and SGD for arrays, on the engine that ctrainer.optim drives for torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from ctrainer._C import OptimEngine
from ctrainer.adapters._numpy_model import Parameter


class Optimizer:
    """The part of torch.optim.Optimizer's interface that training needs.

    param_groups and state are live: they are read at each step. Arrays of state are
    made at a parameter's first step.
    """

    _kind: str
    _native_step = True  # step() is ours, so the trainer may call the engine itself

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._native_step = cls.step is Optimizer.step

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._engine = OptimEngine(self._kind)
        self.defaults = defaults
        self.state: defaultdict[Parameter, dict[str, Any]] = defaultdict(dict)
        self.param_groups: list[dict[str, Any]] = []
        groups = list(params)
        if not groups:
            raise ValueError("params is empty; expected parameters or groups of them")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a dict with "params" and options that differ from the defaults."""
        self._engine.check_idle("add_param_group()")
        params = group["params"]
        params = [params] if isinstance(params, Parameter) else list(params)
        known = {p for g in self.param_groups for p in g["params"]}
        for i, parameter in enumerate(params):
            if not isinstance(parameter, Parameter):
                raise TypeError(
                    f"params[{i}] is a {type(parameter).__name__}; expected a "
                    "ctrainer.adapters.numpy.Parameter"
                )
        if len(set(params)) != len(params) or known.intersection(params):
            raise ValueError("a parameter is listed twice; it belongs to one group")
        self.param_groups.append({**self.defaults, **group, "params": params})

    def step(
        self,
        *,
        max_norm: float | None = None,
        zero_grads: bool = False,
        loss_scale: float = 1.0,
        nonfinite: Literal["keep", "skip", "stop"] = "keep",
        norm_type: float = 2.0,
        clip_value: float | None = None,
        clip_by_group: bool = False,
    ) -> None:
        """Clip, update and zero the gradients, as ctrainer.optim.AdamW.step does."""
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

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients at the last step, before clipping, if asked for."""
        return self._engine.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or fill them with zeros."""
        for parameter in (p for g in self.param_groups for p in g["params"]):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.fill(0)

    def state_dict(self) -> dict[str, Any]:
        """State by the number of the parameter, and groups; arrays are not copied."""
        numbers = {
            p: i
            for i, p in enumerate(p for g in self.param_groups for p in g["params"])
        }
        return {
            "state": {numbers[p]: dict(s) for p, s in self.state.items()},
            "param_groups": [
                {**g, "params": [numbers[p] for p in g["params"]]}
                for g in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of what state_dict() gave.

        Raises:
            ValueError: groups or parameters differ in number; nothing has changed.
        """
        self._engine.check_idle("load_state_dict()")
        saved = state_dict["param_groups"]
        ours = [len(g["params"]) for g in self.param_groups]
        if ours != [len(g["params"]) for g in saved]:
            raise ValueError(
                f"state_dict has groups of {[len(g['params']) for g in saved]} "
                f"parameters; this optimizer has {ours}"
            )
        params = [p for g in self.param_groups for p in g["params"]]
        numbers = [n for g in saved for n in g["params"]]
        state: defaultdict[Parameter, dict[str, Any]] = defaultdict(dict)
        for number, parameter in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                state[parameter] = {
                    k: np.array(v) for k, v in state_dict["state"][number].items()
                }
        groups = zip(self.param_groups, saved, strict=True)
        self.param_groups = [{**s, "params": g["params"]} for g, s in groups]
        self.state = state

    def _new_state(self, parameter: Parameter, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class AdamW(Optimizer):
    """AdamW with torch's defaults.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    _kind = "adamw"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize})

    def _new_state(self, parameter: Parameter, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": np.zeros((), np.float32),
            "exp_avg": np.zeros_like(parameter.data),
            "exp_avg_sq": np.zeros_like(parameter.data),
        }


class SGD(Optimizer):
    """SGD with momentum, with torch's defaults and form."""

    _kind = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "dampening": dampening}
        more = {"weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {**options, **more, "maximize": maximize})

    def _new_state(self, parameter: Parameter, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": np.zeros_like(parameter.data)}
