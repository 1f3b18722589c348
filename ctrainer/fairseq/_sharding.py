"""--ddp-backend fully_sharded: the module that shards, and the norm of all its parts.

Source: fairseq, fairseq/distributed/fully_sharded_data_parallel.py and
fairseq/trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctrainer import _C


def wrap(cfg: Any, module: Any, communicator: _C.Communicator) -> Any:
    """The module in a FullyShardedDataParallel, by the options of the groups
    distributed_training and common of fairseq's config."""
    from ctrainer.compat.fairscale import FullyShardedDataParallel

    options = cfg.distributed_training
    compute = compute_dtype(cfg)
    wide = getattr(options, "fp32_reduce_scatter", False)
    return FullyShardedDataParallel(
        module,
        communicator,
        mixed_precision=compute is not None,
        compute_dtype=compute,
        fp32_reduce_scatter=wide and compute is not None,
        reshard_after_forward=not getattr(options, "no_reshard_after_forward", False),
        flatten_parameters=not getattr(options, "not_fsdp_flatten_parameters", False),
        cpu_offload=getattr(options, "cpu_offload", False),
        gather_bits=_bits(options, "gather_bits"),
        reduce_bits=_bits(options, "reduce_bits"),
    )


def _bits(options: Any, name: str) -> int | None:
    bits = getattr(options, name, 32)
    return None if bits == 32 else int(bits)


def reduces_to_codes(cfg: Any) -> bool:
    """Do gradients travel as codes, which remember what they miss?"""
    group = getattr(cfg, "distributed_training", None)
    return is_sharded(cfg) and getattr(group, "reduce_bits", 32) != 32


def compute_dtype(cfg: Any) -> Any:
    """What sharded parameters are while they compute; None: float32, as their shards
    always are."""
    from ctrainer.adapters import torch_fairseq as tools

    fp16, bf16 = (getattr(cfg.common, name, False) for name in ("fp16", "bf16"))
    return tools.sample_dtype(fp16, bf16)


def is_sharded(cfg: Any) -> bool:
    """Are parameters, gradients and optimizer state sharded over the processes?"""
    group = getattr(cfg, "distributed_training", None)
    return bool(getattr(group, "ddp_backend", None) == "fully_sharded")


def saves_shards(cfg: Any) -> bool:
    """Has each process a checkpoint of its own, with its part?"""
    group = getattr(cfg, "distributed_training", None)
    return is_sharded(cfg) and bool(getattr(group, "use_sharded_state", False))


def metadata_of(module: Any) -> dict[str, Any]:
    """get_shard_metadata() in plain types, by which shards are put together."""
    from ctrainer.fsdp.shard_files import plain

    metadata: dict[str, Any] = plain(module.get_shard_metadata())
    return metadata


def parameter_names(module: Any) -> list[str]:
    """Of the whole parameters, as get_shard_from_optim_state_dict() numbers them."""
    from ctrainer.fsdp.optim_state import held_in

    return [name for held in held_in(module) for name in held.names]


def load_shards(module: Any, filename: str, state: dict[str, Any]) -> None:
    """Load what local_state_dict() gave on this process.

    Raises ValueError where the file is of another process, or of another number.
    """
    saved = state.get("shard_metadata") or {}
    found = saved.get("rank"), saved.get("world_size")
    if found != (module.rank, module.world_size):
        raise ValueError(
            f"{filename} holds the shards of process {found[0]} of {found[1]}, and "
            f"this is {module.rank} of {module.world_size}: run as many, or put the "
            "shards together with python -m ctrainer consolidate"
        )
    module.load_local_state_dict(state["model"])


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
    ("optimization", "use_bmuf", "BMUF needs the whole model in every process"),
)
