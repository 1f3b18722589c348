"""Optimizers for arrays, on the engine that ctrainer.optim drives for torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from ctrainer._C import OptimEngine
from ctrainer.adapters._numpy_model import Parameter
from ctrainer.arguments.optimizer_docs import NUMPY, describe

# The classes that optim= may mean.
NAMES = ("Adagrad", "Adam", "AdamW", "Lion", "RMSprop", "SGD")


class Optimizer:
    """The part of torch.optim.Optimizer's interface that training needs.

    param_groups and state are live: they are read at each step. Arrays of state are
    made at a parameter's first step.

    Args:
        params (Iterable[Any]): Parameters, or dicts with parameters under "params" and
            options of their own.
        defaults (dict[str, Any]): Options of groups that lack them.

    Raises:
        ValueError: params is empty, or has a parameter twice.
        TypeError: something that is no Parameter.

    Example:
        >>> import numpy as np
        >>> from ctrainer.adapters.numpy import Optimizer, Parameter, SGD
        >>> isinstance(SGD([Parameter(np.ones(3, np.float32))]), Optimizer)
        True
    """

    _kind: str
    _counts = True  # the state has a number of steps
    # Arrays of the state that are zeros like the parameter: "name", or "name if option"
    # for groups with that option.
    _moments: tuple[str, ...]
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

    def __getstate__(self) -> dict[str, Any]:
        self._engine.check_idle("copying")
        return {name: v for name, v in vars(self).items() if name != "_engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._engine = OptimEngine(self._kind)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group.

        Args:
            group (dict[str, Any]): A dict with "params" and options that differ from
                the defaults.

        Raises:
            TypeError: something that is no Parameter.
            ValueError: a parameter that is listed twice or in a group already.
        """
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
        """Clip, update and zero the gradients, as ctrainer.optim.AdamW.step does.

        Args:
            max_norm (float | None, default None): The largest norm of the gradients,
                after division by loss_scale; None: no clipping.
            zero_grads (bool, default False): Write zeros over the gradients in the same
                pass.
            loss_scale (float, default 1.0): The factor that the loss was multiplied by.
            nonfinite (Literal[keep, skip, stop], default 'keep'): For a gradient that
                is Inf or NaN: "keep" updates all the same, "skip" changes nothing,
                "stop" raises.
            norm_type (float, default 2.0): p of the norm, > 0; inf for the largest
                element.
            clip_value (float | None, default None): After max_norm, clip each element
                to [-clip_value, clip_value].
            clip_by_group (bool, default False): Let max_norm bound the norm of each
                group by itself.

        Raises:
            FloatingPointError: nonfinite is "stop" and a gradient is not finite.
        """
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
        """Drop the gradients, or fill them with zeros.

        Args:
            set_to_none (bool, default True): Drop them.
        """
        for parameter in (p for g in self.param_groups for p in g["params"]):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.fill(0)

    def state_dict(self) -> dict[str, Any]:
        """Return state by the number of the parameter, and groups; arrays are not
        copied."""
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
        """Load copies of what state_dict() returned.

        Args:
            state_dict (dict[str, Any]): "state" and "param_groups".

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
        """Return the state of a parameter before its first step. Called by the
        engine."""
        state = {"step": np.zeros((), np.float32)} if self._counts else {}
        for moment in self._moments:
            name, _, option = moment.partition(" if ")
            if not option or group.get(option):
                state[name] = np.zeros_like(parameter.data)
        return state


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, of a constructor's locals()."""
    others = ("self", "__class__", "params")
    return {name: v for name, v in arguments.items() if name not in others}


class AdamW(Optimizer):
    """AdamW with torch's defaults.

    Args:
        params (Iterable[Any]): Parameters, or dicts with parameters under 'params' and
            options of their own.
        weight_decay (float, default 0.01): A step shrinks the parameter by lr *
            weight_decay; >= 0.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    _kind = "adamw"
    _moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq if amsgrad")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, _options(locals()))


class Adam(AdamW):
    """Adam with torch's defaults: the weight decay is added to the gradient.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
    """

    _kind = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, **_options(locals()))


class Adagrad(Optimizer):
    """Adagrad with torch's defaults and form.

    Args:
        lr_decay (float, default 0.0): Update t has the learning rate lr / (1 + (t - 1)
            * lr_decay); >= 0.
        initial_accumulator_value (float, default 0.0): Where the sum of squared
            gradients starts, >= 0.
        eps (float, default 1e-10): Added to the root of the sum of squares, >= 0.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization", 2011.
    """

    _kind = "adagrad"
    _moments = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, _options(locals()))

    def _new_state(self, parameter: Parameter, group: dict[str, Any]) -> dict[str, Any]:
        state = super()._new_state(parameter, group)
        state["sum"].fill(group["initial_accumulator_value"])
        return state


class RMSprop(Optimizer):
    """RMSprop with torch's defaults and form, as ctrainer.optim.RMSprop.

    Args:
        alpha (float, default 0.99): Decay of the mean of squared gradients, >= 0.
        centered (bool, default False): Divide by the variance: subtract the squared
            mean of gradients.
    """

    _kind = "rmsprop"
    _moments = ("square_avg", "momentum_buffer if momentum", "grad_avg if centered")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, _options(locals()))


class Lion(Optimizer):
    """Lion with its authors' defaults, as ctrainer.optim.Lion.

    Args:
        betas (tuple[float, float], default (0.9, 0.99)): Decays of the direction, and
            of the momentum that is kept, in [0, 1).
        weight_decay (float, default 0.0): A step shrinks the parameter by lr *
            weight_decay; >= 0.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
    """

    _kind = "lion"
    _counts = False
    _moments = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, _options(locals()))


class SGD(Optimizer):
    """SGD with momentum, with torch's defaults and form."""

    _kind = "sgd"
    _counts = False
    _moments = ("momentum_buffer",)

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
        super().__init__(params, _options(locals()))


for _cls in (SGD, Adagrad, Adam, AdamW, Lion, RMSprop):
    describe(_cls, NUMPY)
