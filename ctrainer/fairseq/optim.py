"""fairseq's optimizers and wrappers: its class names and interface over ours.

`build_optimizer(cfg, params)` reads the config group `optimizer` as fairseq does. The
update is one pass of the engine: gradients are unscaled, divided by the sample size,
clipped and used without being written. Parameters have to be in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ctrainer import _C, optim
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.bmuf import BMUF
from ctrainer.fairseq import _zero
from ctrainer.fairseq._composite import groups_of, is_composite, schedules_of
from ctrainer.fairseq._optim_options import OPTIMIZERS, name_of, options_of
from ctrainer.fairseq._optimizers import (
    CLASSES,
    SGD,
    Adadelta,
    Adagrad,
    FairseqAdafactor,
    FairseqAdam,
    FairseqAdamax,
    FairseqCompositeOptimizer,
    FairseqCPUAdam,
    FairseqLAMB,
    FairseqNAG,
    FairseqOptimizer,
)
from ctrainer.fairseq._sharding import is_sharded

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


def _face(cfg: Any, params: list[Any]) -> tuple[Any, dict[str, Any]]:
    """The class in ctrainer.optim for a config group, and its arguments."""
    name, options = options_of(cfg)
    return getattr(optim, OPTIMIZERS[name]), {"params": params, **options}


def _composite(cfg: Any, params: list[Any], **precision: Any) -> Any:
    groups = []
    for group in groups_of(cfg, params):
        cls, options = _face(group.optimizer, group.params)
        groups.append({"optimizer": cls, **options})
    return optim.Composite(groups, **precision)


def _inner(
    cfg: Any, params: Iterable[Any], sharing: Sharing = None, **precision: Any
) -> Any:
    """Our engine's optimizer for a config group, its state shared out over the ranks
    where there are any."""
    params = list(params)
    if not tools.on_host(params):
        raise ValueError(
            f"optimizer {name_of(cfg)!r} of ctrainer updates parameters in host "
            "memory, and these are on a GPU: set common.cpu"
        )
    if is_composite(cfg):
        return _composite(cfg, params, **precision)
    cls, options = _face(cfg, params)
    if sharing is not None:
        return _zero.share_out(sharing, cls, precision, **options)
    return cls(**options, **precision)


def _with_schedules(cfg: Any, made: FairseqOptimizer) -> FairseqOptimizer:
    """Give a composite, wrapped or not, the schedules that its groups have."""
    if is_composite(cfg):
        made.lr_scheduler = schedules_of(cfg, made)
    return made


def build_optimizer(
    cfg: Any, params: Iterable[Any], sharing: Sharing = None
) -> FairseqOptimizer:
    """The optimizer of a config group, as --optimizer names it. sharing: the group
    whose ranks have a part of the state each.

    Raises ValueError for a name that fairseq has not, and for an option that is out of
    range or that this package does not have.
    """
    inner = _inner(cfg, params, sharing)
    return _with_schedules(cfg, CLASSES[name_of(cfg)](cfg, inner))


def _supports(cfg: Any, params: list[Any], what: str) -> bool:
    """Whether the class of the optimizer does, or those of all groups."""
    if what == "supports_flat_params" or not is_composite(cfg):
        return bool(getattr(CLASSES[name_of(cfg)], what))
    groups = groups_of(cfg, params)
    return all(getattr(CLASSES[name_of(g.optimizer)], what) for g in groups)


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


class FairseqBMUF(BMUF):
    """BMUF by the name that fairseq's checkpoints have for it."""


def build_trainer_optimizer(
    cfg: Any, params: Iterable[Any], communicator: _C.Communicator | None
) -> Any:
    """The optimizer of a whole config, whose workers meet at the ends of blocks where
    it uses BMUF.

    communicator: the group of the workers; None: this process trains alone.
    """
    sharing = communicator if _zero.is_wanted(cfg) else None
    optimizer = build_precise_optimizer(cfg, params, sharing)
    if not getattr(cfg.optimization, "use_bmuf", False):
        return optimizer
    return FairseqBMUF(cfg.bmuf, optimizer, communicator)


def build_precise_optimizer(
    cfg: Any, params: Iterable[Any], sharing: Sharing = None
) -> FairseqOptimizer:
    """The optimizer of a whole config, wrapped as its precision asks; its state shared
    out over the ranks of `sharing`.

    Raises ValueError and RuntimeError, in fairseq's words, for an optimizer that the
    precision excludes.
    """
    common, kind = cfg.common, CLASSES[name_of(cfg.optimizer)]
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
    common, kind = cfg.common, CLASSES[name_of(cfg.optimizer)]
    if is_sharded(cfg) and (fp16 or bf16):
        core = _scaler(cfg) if fp16 else None
        inner = _inner(cfg.optimizer, params)  # of shards, which are float32
        return MemoryEfficientFP16Optimizer(cfg.optimizer, inner, core, "fp16")
    if getattr(common, "memory_efficient_fp16", False) or getattr(
        common, "memory_efficient_bf16", False
    ):
        if not _supports(cfg.optimizer, params, "supports_memory_efficient_fp16"):
            raise ValueError(f"Unsupported optimizer: {kind.__name__}")
        core = _scaler(cfg) if fp16 else None
        inner = _inner(cfg.optimizer, params, sharing, fp32_state=True)
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
