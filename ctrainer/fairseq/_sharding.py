"""--ddp-backend fully_sharded: the module that shards, and the norm of all its parts.

Source: fairseq, fairseq/distributed/fully_sharded_data_parallel.py and
fairseq/trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctrainer import _C


def wrap(options: Any, module: Any, communicator: _C.Communicator) -> Any:
    """The module in a FullyShardedDataParallel, by the options of fairseq's group
    distributed_training."""
    from ctrainer.compat.fairscale import FullyShardedDataParallel

    return FullyShardedDataParallel(
        module,
        communicator,
        reshard_after_forward=not getattr(options, "no_reshard_after_forward", False),
        flatten_parameters=not getattr(options, "not_fsdp_flatten_parameters", False),
        cpu_offload=getattr(options, "cpu_offload", False),
    )


def norm_of_all(communicator: _C.Communicator) -> Callable[[Any], Any]:
    """From the norm of a process's gradients to that of all, each having a part."""

    def aggregate(norm: Any) -> Any:
        total = norm.double().square().reshape(1)
        communicator.all_reduce(total, "sum")
        return total.sqrt()

    return aggregate


def check(setting: Callable[..., Any], cfg: Any) -> None:
    """Raise ValueError for what does not go with fully_sharded, naming it."""
    for group, name, why in _EXCLUDED:
        if setting(cfg, group, name, False):
            raise ValueError(
                f"{group}.{name} does not go with --ddp-backend=fully_sharded: {why}"
            )


_EXCLUDED = (
    ("common", "fp16", "sharded parameters are trained in float32"),
    ("common", "amp", "sharded parameters are trained in float32"),
    ("ema", "store_ema", "no process holds the model that would be averaged"),
    ("optimization", "use_bmuf", "BMUF needs the whole model in every process"),
    (
        "distributed_training",
        "use_sharded_state",
        "checkpoints hold the whole state; make shards of them when loading",
    ),
)
