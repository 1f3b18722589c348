"""What fairseq's Trainer checks of its config, and what ours refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any, get_origin

from ctrainer.arguments.settings import hints, without_none
from ctrainer.fairseq import _sharding, _zero
from ctrainer.fairseq.config.trees import groups, is_dict_config, tree_of
from ctrainer.fairseq.config.values import convert


def setting(cfg: Any, group: str, name: str, default: Any) -> Any:
    """cfg.group.name, or fairseq's default where the config lacks it."""
    return getattr(getattr(cfg, group, None), name, default)


def check_config(cfg: Any) -> None:
    """Raise for settings out of range, for those that exclude each other, in fairseq's
    words, and for those that this trainer does not have.

    Raises:
        ValueError: the message names the setting.
        AssertionError: fp16 together with amp, as in fairseq.
    """
    _check_values(cfg)
    _check_sharding(cfg)
    _zero.check(setting, cfg)
    _check_slowmo(cfg)
    if setting(cfg, "common", "fp16", False):
        assert not setting(cfg, "common", "amp", False), (
            "Cannot use fp16 and AMP together"
        )
    for group, name, allowed, why in _REFUSED:
        value = setting(cfg, group, name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{group}.{name} is {value!r}: {why}")


_READ = (
    "common", "distributed_training", "dataset", "optimization", "checkpoint", "bmuf",
    "ema",
)  # fmt: skip


def _check_values(cfg: Any) -> None:
    """The numbers that have a range: as_config() need not have made the config."""
    for group in _READ:
        cls, given = groups()[group], getattr(cfg, group, None)
        if is_dict_config(given):
            given = SimpleNamespace(**tree_of(given))
        for name, hint in hints(cls).items():
            ranged = get_origin(without_none(hint)[0]) is Annotated
            if ranged and hasattr(given, name):
                convert(getattr(given, name), hint, f"{group}.{name}")


def _check_sharding(cfg: Any) -> None:
    where = "distributed_training"
    if setting(cfg, where, "ddp_backend", None) != "fully_sharded":
        if setting(cfg, where, "cpu_offload", False):
            raise ValueError("--cpu-offload requires --ddp-backend=fully_sharded")
        return
    if setting(cfg, where, "zero_sharding", "none") != "none":
        raise ValueError(
            "FullyShardedDataParallel is not compatible with --zero-sharding option "
            "(it's already built in)"
        )
    _sharding.check(setting, cfg)


def _check_slowmo(cfg: Any) -> None:
    where = "distributed_training"
    several = setting(cfg, where, "distributed_world_size", 1)
    if several < 2 or setting(cfg, where, "ddp_backend", None) != "slowmo":
        return
    base = setting(cfg, where, "slowmo_base_algorithm", "localsgd")
    if base != "localsgd":
        raise ValueError(
            f"distributed_training.slowmo_base_algorithm is {base!r}; expected localsgd"
        )
    if setting(cfg, where, "nprocs_per_node", 1) != 1:
        raise ValueError(
            "distributed_training.nprocs_per_node is above 1: gradients are not "
            "exchanged within a node; set it to 1"
        )


_WHOLE = "every worker of this trainer holds the whole model and its optimizer"
_REFUSED: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("common", "tpu", (False,), "there is no support for TPUs here"),
    ("common", "model_parallel_size", (1,), _WHOLE),
    ("distributed_training", "pipeline_model_parallel", (False,), _WHOLE),
    ("model", "base_layers", (0,), f"BASE layers are spread over workers; {_WHOLE}"),
]
