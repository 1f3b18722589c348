"""fairseq's optimizers and wrappers: its class names and interface over ours.

`build_optimizer(cfg, params)` reads the config group `optimizer` as fairseq does. The
update is one pass of the engine: gradients are unscaled, divided by the sample size,
clipped and used without being written. Parameters have to be in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ctrainer import _C, optim
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq._optim_options import OPTIMIZERS, options_of

__all__ = [
    "SGD",
    "AMPOptimizer",
    "Adadelta",
    "Adagrad",
    "AmpScaler",
    "DynamicLossScaler",
    "FP16Optimizer",
    "FairseqAdam",
    "FairseqAdamax",
    "FairseqNAG",
    "FairseqOptimizer",
    "MemoryEfficientFP16Optimizer",
    "build_optimizer",
    "build_precise_optimizer",
]


class FairseqOptimizer(_C.FairseqOptimizer):
    """fairseq's interface over a torch.optim.Optimizer or the like.

    optimizer: what updates. cfg: its config group, kept for those who read it.
    """

    supports_memory_efficient_fp16: ClassVar[bool] = False
    supports_step_with_scale: ClassVar[bool] = True
    supports_groups: ClassVar[bool] = False
    supports_flat_params: ClassVar[bool] = False

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        groups = optimizer.param_groups
        super().__init__(optimizer, on_host=tools.on_host(_all(groups)), **options)
        self.cfg = cfg
        if any(hasattr(p, "expert") for p in _all(groups)):
            raise ValueError(
                "a parameter is marked as an expert's: mixtures of experts need "
                "several processes that hold different ones, and here all are alike"
            )

    @property
    def params(self) -> list[Any]:
        """Every parameter, group by group."""
        return list(_all(self.param_groups))

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The options of the first group, without its parameters."""
        return {k: v for k, v in self.param_groups[0].items() if k != "params"}

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, in torch's layout."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: Any = None
    ) -> None:
        """Load a state; optimizer_overrides then replace options of every group."""
        self.optimizer.load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})

    def average_params(self) -> None:
        """Average the state over processes, which all have the same."""

    def broadcast_global_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Send the state to all processes, which have all loaded it."""
        return state_dict

    _scalar = staticmethod(tools.scalar)

    def _device_norm(self) -> Any:
        return tools.grad_norm(self.param_groups)

    def _device_divide(self, by: float) -> None:
        tools.divide_grads(self.param_groups, by)


def _all(groups: list[dict[str, Any]]) -> Iterable[Any]:
    return (p for group in groups for p in group["params"])


class FairseqAdam(FairseqOptimizer):
    """Adam with decoupled weight decay and eps outside of the bias correction."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True


class FairseqAdamax(FairseqOptimizer):
    """Adamax with decoupled weight decay."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True


class FairseqNAG(FairseqOptimizer):
    """Nesterov's accelerated gradient, whose momentum follows the learning rate."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True


class SGD(FairseqOptimizer):
    """torch's SGD."""

    supports_flat_params = True


class Adadelta(FairseqOptimizer):
    """torch's Adadelta."""

    supports_flat_params = True


class Adagrad(FairseqOptimizer):
    """torch's Adagrad."""


_CLASSES: dict[str, type[FairseqOptimizer]] = {
    "adam": FairseqAdam,
    "adamax": FairseqAdamax,
    "nag": FairseqNAG,
    "sgd": SGD,
    "adadelta": Adadelta,
    "adagrad": Adagrad,
}


def _inner(cfg: Any, params: Iterable[Any], **precision: Any) -> tuple[str, Any]:
    """The name of the optimizer that the config group asks for, and our engine's."""
    params = list(params)
    name, options = options_of(cfg)
    if not tools.on_host(params):
        raise ValueError(
            f"optimizer {name!r} of ctrainer updates parameters in host memory, and "
            "these are on a GPU: set common.cpu"
        )
    return name, getattr(optim, OPTIMIZERS[name])(params, **options, **precision)


def build_optimizer(cfg: Any, params: Iterable[Any]) -> FairseqOptimizer:
    """The optimizer of a config group, as --optimizer names it.

    Raises ValueError for one that fairseq has and this package has not, and for an
    option that is out of range.
    """
    name, inner = _inner(cfg, params)
    return _CLASSES[name](cfg, inner)


class DynamicLossScaler:
    """fairseq's loss scaler: a face over the one that the optimizer updates."""

    def __init__(self, core: _C.LossScaler) -> None:
        self.core = core

    @property
    def loss_scale(self) -> float:
        return self.core.scale

    def scale(self, outputs: Any) -> Any:
        return self.core.scale * outputs


class AmpScaler(DynamicLossScaler):
    """The same with the method that torch's GradScaler has."""

    def get_scale(self) -> float:
        return self.core.scale


class _Scaled(FairseqOptimizer):
    """What the wrappers share: a scaler, whose scale is part of the state."""

    scaler: DynamicLossScaler | None

    def __init__(
        self, cfg: Any, optimizer: Any, core: _C.LossScaler | None, rules: str
    ) -> None:
        super().__init__(cfg, optimizer, scaler=core, rules=rules)
        face = AmpScaler if rules == "amp" else DynamicLossScaler
        self.scaler = None if core is None else face(core)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, and of the scaler."""
        state = super().state_dict()
        if self.scaler is not None:
            state["loss_scale"] = self.scaler.loss_scale
            state["loss_scaler"] = self.scaler.core.state_dict()
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: Any = None
    ) -> None:
        """Load a state of ours or of fairseq's, which has the scale alone."""
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
    """Updates a float32 copy of 16-bit parameters; fp16 with a loss scale.

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
        """The state of the optimizer, joined where flat, and of the scaler."""
        state = super().state_dict()
        if self.flat:
            state.update(tools.flat_state(state, [p.numel() for p in self.params]))
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: Any = None
    ) -> None:
        """Load a state of ours or of fairseq's, flat or not."""
        shapes = [p.shape for p in self.params]
        state = {**state_dict, **tools.unflatten_state(state_dict, shapes)}
        super().load_state_dict(state, optimizer_overrides)

    @property
    def fp32_params(self) -> list[Any]:
        """The float32 copies, which the first update makes."""
        states = (self.optimizer.state.get(p, {}) for p in self.params)
        return [s["master_param"] for s in states if "master_param" in s]


class MemoryEfficientFP16Optimizer(_Scaled):
    """Updates 16-bit parameters in place, with float32 state and arithmetic."""

    supports_flat_params = True


class AMPOptimizer(_Scaled):
    """Updates float32 parameters under a loss scale: an overflow skips the step."""

    supports_flat_params = True


def build_precise_optimizer(cfg: Any, params: Iterable[Any]) -> FairseqOptimizer:
    """The optimizer of a whole config, wrapped as its precision asks.

    Raises ValueError and RuntimeError, in fairseq's words, for an optimizer that the
    precision excludes.
    """
    common = cfg.common
    fp16, bf16 = getattr(common, "fp16", False), getattr(common, "bf16", False)
    if not (fp16 or bf16 or getattr(common, "amp", False)):
        return build_optimizer(cfg.optimizer, params)
    name, _ = options_of(cfg.optimizer)
    kind = _CLASSES[name]
    if getattr(common, "memory_efficient_fp16", False) or getattr(
        common, "memory_efficient_bf16", False
    ):
        if not kind.supports_memory_efficient_fp16:
            raise ValueError(f"Unsupported optimizer: {kind.__name__}")
        core = _scaler(cfg) if fp16 else None
        _, inner = _inner(cfg.optimizer, params, fp32_state=True)
        return MemoryEfficientFP16Optimizer(cfg.optimizer, inner, core, "fp16")
    if not (fp16 or bf16):
        _, inner = _inner(cfg.optimizer, params)
        return AMPOptimizer(cfg.optimizer, inner, _amp_scaler(common), "amp")
    flat = fp16 and not getattr(common, "fp16_no_flatten_grads", False)
    if flat and not kind.supports_flat_params:
        raise RuntimeError(
            f"chosen optimizer {kind.__name__} does not support flat params, please "
            "set --fp16-no-flatten-grads"
        )
    core = _scaler(cfg) if fp16 else None
    _, inner = _inner(cfg.optimizer, params, master_weights=True)
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
