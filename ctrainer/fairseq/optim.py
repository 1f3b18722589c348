"""fairseq's optimizers and wrappers: its class names and interface over ours.

`build_optimizer(cfg, params)` reads the config group `optimizer` as fairseq does. The
update is one pass of the engine: gradients are unscaled, divided by the sample size,
clipped and used without being written. Parameters have to be in host memory.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ctrainer import _C, optim
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.adapters.fairseq_optimizer import FairseqOptimizer
from ctrainer.bmuf import BMUF
from ctrainer.fairseq import _sharding
from ctrainer.fairseq._sharding import is_sharded
from ctrainer.fairseq.config import default_options
from ctrainer.fairseq.config.optimizers import OPTIMIZERS as _CONFIGS
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler

# fairseq's optimizers by its class names, over ours.


class _Elementwise(FairseqOptimizer):
    """An optimizer that works element by element, in any precision."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True


class FairseqAdam(_Elementwise):
    """Adam with decoupled weight decay and eps outside of the bias correction."""


class FairseqAdamax(_Elementwise):
    """Adamax with decoupled weight decay."""


class FairseqNAG(_Elementwise):
    """Nesterov's accelerated gradient, whose momentum follows the learning rate."""


class SGD(FairseqOptimizer):
    """torch's SGD."""

    supports_flat_params = True


class Adadelta(FairseqOptimizer):
    """torch's Adadelta."""

    supports_flat_params = True


class Adagrad(FairseqOptimizer):
    """torch's Adagrad."""


class FairseqAdafactor(FairseqOptimizer):
    """Adafactor, without fairseq's compounding of scaled learning rates."""

    supports_memory_efficient_fp16 = True


class FairseqLAMB(FairseqOptimizer):
    """apex's LAMB, which clips all gradients to a norm of 1 as well."""


class FairseqCPUAdam(_Elementwise):
    """DeepSpeed's Adam of the host, which is torch's AdamW."""


class FairseqCompositeOptimizer(FairseqOptimizer):
    """An optimizer for each group of parameters, all in one step.

    lr_scheduler: the groups' schedules, where the config has them; for pass_through.
    """

    supports_groups = True


# fairseq's options of each optimizer, as the arguments of ours.

_SAME = ("beta1", "clip_threshold", "decay_rate", "relative_step", "scale_parameter",
         "warmup_init")  # fmt: skip
_ADAM = {"betas": "adam_betas", "eps": "adam_eps"}
# By the name of --optimizer: fairseq's class, the class of ctrainer.optim, and of its
# arguments those that fairseq has an option for, with the option.
OPTIMIZERS: dict[str, tuple[type[FairseqOptimizer], str, dict[str, str]]] = {
    "adafactor": (FairseqAdafactor, "Adafactor",
                  {"eps": "adafactor_eps", **dict(zip(_SAME, _SAME, strict=True))}),
    "adam": (FairseqAdam, "FairseqAdam", _ADAM),
    "adamax": (FairseqAdamax, "FairseqAdamax",
               {"betas": "adamax_betas", "eps": "adamax_eps",
                "bias_correction": "no_bias_correction"}),
    "nag": (FairseqNAG, "FairseqNAG", {"momentum": "momentum"}),
    "sgd": (SGD, "SGD", {"momentum": "momentum"}),
    "adadelta": (Adadelta, "Adadelta", {"rho": "adadelta_rho", "eps": "adadelta_eps"}),
    "adagrad": (Adagrad, "Adagrad", {}),
    "composite": (FairseqCompositeOptimizer, "Composite", {}),
    "cpu_adam": (FairseqCPUAdam, "AdamW", _ADAM),
    "lamb": (FairseqLAMB, "LAMB", {"betas": "lamb_betas", "eps": "lamb_eps"}),
}  # fmt: skip


def name_of(cfg: Any) -> str:
    """The optimizer that a config group names. Raises ValueError where none is."""
    name = getattr(cfg, "_name", None) or getattr(cfg, "optimizer", None)
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {name!r}; expected one of {list(OPTIMIZERS)}")
    return name


def class_of(cfg: Any) -> type[FairseqOptimizer]:
    """fairseq's class of the optimizer that a config group names."""
    return OPTIMIZERS[name_of(cfg)][0]


def is_composite(cfg: Any) -> bool:
    """Whether a config group names composite."""
    return name_of(cfg) == "composite"


def _pair(value: Any) -> tuple[float, float]:
    """(0.9, 0.98) or its text, as --adam-betas has it."""
    try:
        first, second = ast.literal_eval(value) if isinstance(value, str) else value
        return float(first), float(second)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(
            f"adam_betas must be two numbers, such as '(0.9, 0.98)', not {value!r}"
        ) from None


def _engine_class(cfg: Any) -> tuple[Any, dict[str, Any]]:
    """The class of ctrainer.optim for a config group, and its arguments.

    fairseq rejects adafactor's relative_step beside its lr, which is always there; here
    it takes the place of lr. Raises ValueError for a name or an option that this
    package does not have.
    """
    name = name_of(cfg)
    if is_composite(cfg):
        raise ValueError(f"optimizer {name!r} is made of groups and cannot be in one")
    if getattr(cfg, "fp16_adam_stats", False):
        raise ValueError(
            "fp16_adam_stats: the state is kept in float32 here; leave it off"
        )
    _, ours, named = OPTIMIZERS[name]
    named, known = (
        {**named, "weight_decay": "weight_decay"},
        default_options(_CONFIGS[name]),
    )
    made = {key: getattr(cfg, option, known[option]) for key, option in named.items()}
    for key in named.keys() & {"betas", "eps"}:
        if not isinstance(made[key], int | float):
            made[key] = _pair(made[key])
    if name == "adamax":
        made["bias_correction"] = not made["bias_correction"]
    lr = cfg.lr if isinstance(cfg.lr, int | float) else cfg.lr[0]
    made["lr"] = None if made.get("relative_step") else float(lr)
    return getattr(optim, ours), made


# fairseq's composite: an optimizer and a schedule for each group of parameters.


@dataclass(frozen=True)
class Group:
    """Parameters whose param_group is the name, and their two config groups."""

    name: str
    params: list[Any]
    optimizer: Any
    lr_scheduler: Any


def groups_of(cfg: Any, params: Iterable[Any]) -> list[Group]:
    """The groups of a config `composite`, in the order of their names.

    A parameter belongs to the group that its attribute param_group names, "default"
    where it has none. A group's own `lr` overrides that of its two configs.

    Raises ValueError for groups without parameters or parameters without a group, for a
    group without a learning rate, and for dynamic_groups.
    """
    if getattr(cfg, "dynamic_groups", False):
        raise ValueError(
            "optimizer.dynamic_groups: groups are not made of the parameters' "
            "optim_overrides here; name each of them in optimizer.groups"
        )
    members: dict[str, list[Any]] = {}
    for param in params:
        members.setdefault(getattr(param, "param_group", "default"), []).append(param)
    configs = cfg.groups
    if set(configs) != set(members):
        raise ValueError(
            f"optimizer.groups has {sorted(configs)}, and the parameters are of "
            f"{sorted(members)}: these have to be the same (a parameter without the "
            "attribute param_group is of 'default')"
        )
    return [_group(name, configs[name], members[name]) for name in sorted(members)]


def _options(cfg: Any) -> dict[str, Any]:
    return dict(cfg) if isinstance(cfg, Mapping) else dict(vars(cfg))


def _group(name: str, cfg: Any, params: list[Any]) -> Group:
    options = _options(cfg)
    lr = {"lr": options["lr"]} if options.get("lr") is not None else {}
    made = {
        key: SimpleNamespace(**{**_options(options[key]), **lr})
        for key in ("optimizer", "lr_scheduler")
        if options.get(key) is not None
    }
    if not hasattr(made.get("optimizer"), "lr"):
        raise ValueError(
            f"optimizer.groups[{name!r}] has no learning rate: set `lr` in it "
            "or its `optimizer`"
        )
    return Group(name, params, made["optimizer"], made.get("lr_scheduler"))


class CompositeLRScheduler:
    """A schedule for each group, as the optimizer's lr_scheduler: the schedule
    pass_through forwards all calls to it."""

    def __init__(self, schedules: dict[str, Any]) -> None:
        self.lr_schedulers = schedules

    def _each(self, method: str, *args: Any) -> dict[str, Any]:
        return {k: getattr(s, method)(*args) for k, s in self.lr_schedulers.items()}

    def state_dict(self) -> dict[str, Any]:
        """The states by the groups' names."""
        return self._each("state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what state_dict() of the same groups gave."""
        for name, schedule in self.lr_schedulers.items():
            schedule.load_state_dict(state_dict[name])

    def step_begin_epoch(self, epoch: int) -> dict[str, Any]:
        """Begin an epoch in every group; the learning rates by the groups' names."""
        return self._each("step_begin_epoch", epoch)

    def step(self, epoch: int, val_loss: float | None = None) -> dict[str, Any]:
        """End an epoch in every group; the learning rates by the groups' names."""
        return self._each("step", epoch, val_loss)

    def step_update(self, num_updates: int) -> dict[str, Any]:
        """Set every group's learning rate; the learning rates by the groups' names."""
        return self._each("step_update", num_updates)


def schedules_of(cfg: Any, optimizer: Any) -> CompositeLRScheduler | None:
    """The schedules of a config `composite` over an optimizer made of its groups, or
    None where no group has one.

    Raises ValueError where some have and others have not.
    """
    groups = groups_of(cfg, (p for g in optimizer.param_groups for p in g["params"]))
    without = [group.name for group in groups if group.lr_scheduler is None]
    if len(without) == len(groups):
        return None
    if without:
        raise ValueError(
            f"optimizer.groups {without} have no lr_scheduler, and others have: give "
            "every group one, or none"
        )
    return CompositeLRScheduler(
        {
            group.name: build_lr_scheduler(
                group.lr_scheduler._name,
                group.lr_scheduler,
                tools.OneGroup(optimizer, index),
            )
            for index, group in enumerate(groups)
        }
    )


__all__ = [
    "SGD",
    "AMPOptimizer",
    "Adadelta",
    "Adagrad",
    "AmpScaler",
    "DynamicLossScaler",
    "FP16Optimizer",
    "FairseqAdafactor",
    "FairseqAdam",
    "FairseqAdamax",
    "FairseqCPUAdam",
    "FairseqCompositeOptimizer",
    "FairseqLAMB",
    "FairseqNAG",
    "FairseqOptimizer",
    "MemoryEfficientFP16Optimizer",
    "build_optimizer",
    "build_precise_optimizer",
]


Sharing = _C.Communicator | None


def _composite(cfg: Any, params: list[Any], **precision: Any) -> Any:
    groups = []
    for group in groups_of(cfg, params):
        cls, options = _engine_class(group.optimizer)
        groups.append({"optimizer": cls, "params": group.params, **options})
    return optim.Composite(groups, **precision)


def _inner(
    cfg: Any, params: Iterable[Any], sharing: Sharing = None, **precision: Any
) -> Any:
    """Our engine's optimizer for a config group, its state sharded over the ranks of
    `sharing`, if given."""
    params = list(params)
    away = tools.devices_elsewhere(params)
    if away:
        raise ValueError(
            f"optimizer {name_of(cfg)!r} of ctrainer updates parameters in host "
            "memory, or on one GPU with the plugin that pip install 'ctrainer[cuda13]' "
            f"brings, and these are on {', '.join(sorted(away))}: install it, or set "
            "common.cpu"
        )
    if is_composite(cfg):
        return _composite(cfg, params, **precision)
    cls, options = _engine_class(cfg)
    if sharing is not None:
        return _sharding.sharded_optimizer(sharing, cls, precision, params, **options)
    return cls(params, **options, **precision)


def _with_schedules(cfg: Any, made: FairseqOptimizer) -> FairseqOptimizer:
    """Give a composite, wrapped or not, the schedules that its groups have."""
    if is_composite(cfg):
        made.lr_scheduler = schedules_of(cfg, made)
    return made


def build_optimizer(
    cfg: Any, params: Iterable[Any], sharing: Sharing = None
) -> FairseqOptimizer:
    """Return the optimizer of a config group, as --optimizer names it.

    Args:
        cfg: The group, with `_name`.
        params (Iterable[Any]): Parameters, or groups of them.
        sharing (Sharing, default None): The group whose ranks have a shard of the state
            each; None: whole.

    Raises:
        ValueError: a name that fairseq has not, and an option that is out of range or
            not supported.
    """
    inner = _inner(cfg, params, sharing)
    return _with_schedules(cfg, class_of(cfg)(cfg, inner))


def _supports(cfg: Any, params: list[Any], what: str) -> bool:
    """Does the class of the optimizer, or of each group's, have the flag `what`?"""
    if what == "supports_flat_params" or not is_composite(cfg):
        return bool(getattr(class_of(cfg), what))
    groups = groups_of(cfg, params)
    return all(getattr(class_of(g.optimizer), what) for g in groups)


class DynamicLossScaler:
    """fairseq's loss scaler: a wrapper of the one that the optimizer updates.

    Args:
        core (_C.LossScaler): The other one.

    Example:
        >>> from ctrainer import LossScaler
        >>> from ctrainer.fairseq.optim import DynamicLossScaler
        >>> DynamicLossScaler(LossScaler(init_scale=128.0)).loss_scale
        128.0
    """

    def __init__(self, core: _C.LossScaler) -> None:
        self.core = core

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self.core.scale

    def scale(self, outputs: Any) -> Any:
        """Return the loss times the factor.

        Args:
            outputs: The loss.
        """
        return self.core.scale * outputs


class AmpScaler(DynamicLossScaler):
    """DynamicLossScaler with the method that torch's GradScaler has."""

    def get_scale(self) -> float:
        """Return the factor of the loss."""
        return self.core.scale


class _Scaled(FairseqOptimizer):
    """The base of the wrappers: a scaler, whose scale is part of the state."""

    scaler: DynamicLossScaler | None

    def __init__(
        self, cfg: Any, optimizer: Any, core: _C.LossScaler | None, rules: str
    ) -> None:
        super().__init__(cfg, optimizer, scaler=core, rules=rules)
        wrapper = AmpScaler if rules == "amp" else DynamicLossScaler
        self.scaler = None if core is None else wrapper(core)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, and of the scaler."""
        state = super().state_dict()
        if self.scaler is not None:
            state["loss_scale"] = self.scaler.loss_scale
            state["loss_scaler"] = self.scaler.core.state_dict()
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: Any = None
    ) -> None:
        """Load a state.

        Args:
            state_dict (dict[str, Any]): ctrainer's, or fairseq's, which has the scale
                alone.
            optimizer_overrides (default None): Options that then replace those of every
                group.
        """
        plain = {k: v for k, v in state_dict.items() if not k.startswith("loss_scale")}
        super().load_state_dict(plain, optimizer_overrides)
        if self.scaler is None:
            return
        core = self.scaler.core
        if "loss_scaler" in state_dict:
            core.load_state_dict(state_dict["loss_scaler"])
        elif "loss_scale" in state_dict:
            now = core.state_dict()
            name = "loss_scale" if "loss_scale" in now else "scale"
            core.load_state_dict({**now, name: state_dict["loss_scale"]})


class FP16Optimizer(_Scaled):
    """Updates a float32 copy of fp16 or bf16 parameters; fp16 with a loss scale.

    flat: the state_dict() has all parameters joined to one, as fairseq's has them
    without fp16_no_flatten_grads. Its "master_param" is ours: fairseq makes the copy of
    the rounded weights anew.
    """

    supports_flat_params = True

    def __init__(
        self, cfg: Any, optimizer: Any, core: _C.LossScaler | None, flat: bool = False
    ) -> None:
        super().__init__(cfg, optimizer, core, "fp16")
        self.flat = flat

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, joined where flat, and of the scaler."""
        state = super().state_dict()
        if self.flat:
            state.update(tools.flat_state(state, [p.numel() for p in self.params]))
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: Any = None
    ) -> None:
        """Load a state.

        Args:
            state_dict (dict[str, Any]): ctrainer's or fairseq's, flat or not.
            optimizer_overrides (default None): Options that then replace those of every
                group.
        """
        shapes = [p.shape for p in self.params]
        state = {**state_dict, **tools.unflatten_state(state_dict, shapes)}
        super().load_state_dict(state, optimizer_overrides)

    @property
    def fp32_params(self) -> list[Any]:
        """The float32 copies, which the first update makes."""
        states = (self.optimizer.state.get(p, {}) for p in self.params)
        return [s["master_param"] for s in states if "master_param" in s]


class MemoryEfficientFP16Optimizer(_Scaled):
    """Updates fp16 or bf16 parameters in place, with float32 state and arithmetic."""

    supports_flat_params = True


class AMPOptimizer(_Scaled):
    """Updates float32 parameters under a loss scale: an overflow skips the step."""

    supports_flat_params = True


class FairseqBMUF(BMUF):
    """BMUF by the name that fairseq's checkpoints have for it."""


def build_trainer_optimizer(
    cfg: Any, params: Iterable[Any], communicator: _C.Communicator | None
) -> Any:
    """The optimizer of a whole config, whose workers synchronize at the ends of blocks
    with BMUF.

    communicator: the group of the workers; None: this process trains alone.
    """
    sharing = communicator if _sharding.shards_optimizer_state(cfg) else None
    optimizer = build_precise_optimizer(cfg, params, sharing)
    if not getattr(cfg.optimization, "use_bmuf", False):
        return optimizer
    return FairseqBMUF(cfg.bmuf, optimizer, communicator)


def build_precise_optimizer(
    cfg: Any, params: Iterable[Any], sharing: Sharing = None
) -> FairseqOptimizer:
    """Return the optimizer of a whole config, wrapped as its precision asks.

    Args:
        cfg: A FairseqConfig.
        params (Iterable[Any]): Parameters, or groups of them.
        sharing (Sharing, default None): The group whose ranks have a shard of the state
            each; None: whole.

    Raises:
        ValueError, RuntimeError: an optimizer that the precision excludes, in fairseq's
            words.
    """
    common, kind = cfg.common, class_of(cfg.optimizer)
    params = list(params)
    if is_sharded(cfg) and not kind.supports_flat_params:
        raise ValueError(
            "--ddp-backend=fully_sharded is only compatible with pointwise optimizers "
            "(e.g., Adam, AdamW, Adadelta, Adamax, SGD, etc.), whose update of an "
            f"element needs no other; {kind.__name__} is none"
        )
    fp16, bf16 = getattr(common, "fp16", False), getattr(common, "bf16", False)
    if not (fp16 or bf16 or getattr(common, "amp", False)):
        return build_optimizer(cfg.optimizer, params, sharing)
    made = _wrapped(cfg, params, fp16, bf16, sharing)
    return _with_schedules(cfg.optimizer, made)


def _wrapped(
    cfg: Any, params: list[Any], fp16: bool, bf16: bool, sharing: Sharing
) -> FairseqOptimizer:
    common, kind = cfg.common, class_of(cfg.optimizer)
    of_shards = is_sharded(cfg) and (fp16 or bf16)  # which are float32 themselves
    names = ("memory_efficient_fp16", "memory_efficient_bf16")
    if of_shards or any(getattr(common, name, False) for name in names):
        what = "supports_memory_efficient_fp16"
        if not of_shards and not _supports(cfg.optimizer, params, what):
            raise ValueError(f"Unsupported optimizer: {kind.__name__}")
        wide = {} if of_shards else {"fp32_state": True}
        inner = _inner(cfg.optimizer, params, sharing, **wide)
        core = _scaler(cfg) if fp16 else None
        return MemoryEfficientFP16Optimizer(cfg.optimizer, inner, core, "fp16")
    if not (fp16 or bf16):
        inner = _inner(cfg.optimizer, params, sharing)
        return AMPOptimizer(cfg.optimizer, inner, _amp_scaler(common), "amp")
    flat = fp16 and not getattr(common, "fp16_no_flatten_grads", False)
    if flat and not _supports(cfg.optimizer, params, "supports_flat_params"):
        raise RuntimeError(
            f"chosen optimizer {kind.__name__} does not support flat params, please "
            "set --fp16-no-flatten-grads"
        )
    core = _scaler(cfg) if fp16 else None
    inner = _inner(cfg.optimizer, params, sharing, master_weights=True)
    return FP16Optimizer(cfg.optimizer, inner, core, flat)


def _scaler(cfg: Any) -> _C.LossScaler:
    common, update_freq = cfg.common, cfg.optimization.update_freq
    window = getattr(common, "fp16_scale_window", None)
    if window is None:
        if len(update_freq) > 1:
            raise ValueError(
                "--fp16-scale-window must be given explicitly when using a custom "
                "--update-freq schedule"
            )
        workers = getattr(
            getattr(cfg, "distributed_training", None), "distributed_world_size", 1
        )
        window = int(2**14 / workers / update_freq[0])
    return _C.LossScaler.fairseq(
        init_scale=getattr(common, "fp16_init_scale", 128),
        scale_window=window,
        tolerance=getattr(common, "fp16_scale_tolerance", 0.0),
        threshold=getattr(common, "threshold_loss_scale", None),
        min_loss_scale=getattr(common, "min_loss_scale", 1e-4),
    )


def _amp_scaler(common: Any) -> _C.LossScaler:
    """torch's scaler, which fairseq starts at fp16_init_scale.

    Where amp_scale_window is set fairseq reads amp_init_scale for the interval between
    growths; here the window is the window.
    """
    window = getattr(common, "amp_scale_window", None)
    return _C.LossScaler.torch(
        init_scale=getattr(common, "fp16_init_scale", 128),
        growth_interval=2000 if window is None else window,
        min_scale=getattr(common, "min_loss_scale", 1e-4),
    )
