"""--zero-sharding os: each worker keeps the state of the parameters that it updates.

Source: fairseq, fairseq/optim/shard.py and fairseq/trainer.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ctrainer import _C


def is_wanted(cfg: Any) -> bool:
    group = getattr(cfg, "distributed_training", None)
    return getattr(group, "zero_sharding", "none") == "os"


def share_out(
    communicator: _C.Communicator,
    cls: Callable[..., Any],
    precision: dict[str, Any],
    params: list[Any],
    **options: Any,
) -> Any:
    """An optimizer of which each rank has a part: it updates its parameters, with
    whole gradients, and sends them to the others."""
    from ctrainer.compat.fairscale import OSS

    made: Any = functools.partial(cls, **precision)
    return OSS(params, made, communicator, **options)


def check(setting: Callable[..., Any], cfg: Any) -> None:
    """Raise ValueError for what does not go with --zero-sharding os, or is unknown."""
    where = "distributed_training"
    word = setting(cfg, where, "zero_sharding", "none")
    if word not in ("none", "os"):
        raise ValueError(f"{where}.zero_sharding is {word!r}; expected none or os")
    if word == "none":
        return
    apart = "between exchanges each worker updates a model of its own"
    if setting(cfg, "optimization", "use_bmuf", False):
        raise ValueError(f"--use-bmuf does not go with --zero-sharding os: {apart}")
    if setting(cfg, where, "ddp_backend", None) == "slowmo":
        raise ValueError(
            f"--ddp-backend=slowmo does not go with --zero-sharding os: {apart}"
        )
    if setting(cfg, "optimizer", "_name", None) == "composite":
        raise ValueError(
            "--optimizer composite does not go with --zero-sharding os, which shares "
            "out the state of one optimizer"
        )
    _check_precision(setting, cfg)


def _check_precision(setting: Callable[..., Any], cfg: Any) -> None:
    names = ("fp16", "memory_efficient_fp16", "fp16_no_flatten_grads")
    fp16, in_place, apart = (setting(cfg, "common", name, False) for name in names)
    if fp16 and not in_place and not apart:
        raise ValueError(
            "ZeRO is incompatible with fp16 and flattened grads. Please use "
            "--fp16-no-flatten-grads"
        )
