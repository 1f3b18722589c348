"""A sharded model in fairseq's Trainer: --ddp-backend fully_sharded, --zero-sharding os
and the moving average of a part.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq.config.base import setting
from ctrainer.fairseq.ema import EMA

_GROUP = "distributed_training"

# --ddp-backend fully_sharded: the module that shards, and the norm of all its parts.
#
# Source: fairseq, fairseq/distributed/fully_sharded_data_parallel.py and
# fairseq/trainer.py.


def wrap(cfg: Any, module: Any, communicator: _C.Communicator) -> Any:
    """The module in a FullyShardedDataParallel, by the options of the groups
    distributed_training and common of fairseq's config."""
    from ctrainer.compat.fairscale import FullyShardedDataParallel

    # The dtype of the forward and backward pass; None: float32, as shards always are.
    compute = tools.sample_dtype(
        setting(cfg, "common", "fp16"), setting(cfg, "common", "bf16")
    )

    def option(name: str) -> bool:
        return bool(setting(cfg, _GROUP, name))

    def bits(name: str) -> int | None:
        found = int(setting(cfg, _GROUP, name, 32))
        return None if found == 32 else found

    return FullyShardedDataParallel(
        module,
        communicator,
        mixed_precision=compute is not None,
        compute_dtype=compute,
        fp32_reduce_scatter=option("fp32_reduce_scatter") and compute is not None,
        reshard_after_forward=not option("no_reshard_after_forward"),
        flatten_parameters=not option("not_fsdp_flatten_parameters"),
        cpu_offload=option("cpu_offload"),
        gather_bits=bits("gather_bits"),
        reduce_bits=bits("reduce_bits"),
    )


def copy_of(module: Any) -> Any:
    """A copy of a module whose parameters it has itself.

    Raises ValueError for one with sharded units, which cannot be copied.
    """
    from ctrainer.fsdp import FullyShardedDataParallel

    if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
        raise ValueError(
            "ema.store_ema copies the model before it is sharded, and it has units of "
            "FullyShardedDataParallel already; leave the wrapping to the trainer"
        )
    return copy.deepcopy(module)


def reduces_quantized(cfg: Any) -> bool:
    """Are gradients exchanged quantized, with error-feedback residuals?"""
    return is_sharded(cfg) and setting(cfg, _GROUP, "reduce_bits", 32) != 32


def is_sharded(cfg: Any) -> bool:
    """Are parameters, gradients and optimizer state sharded over the processes?"""
    return bool(setting(cfg, _GROUP, "ddp_backend") == "fully_sharded")


def saves_shards(cfg: Any) -> bool:
    """Has each process a checkpoint of its own, with its shards?"""
    return is_sharded(cfg) and bool(setting(cfg, _GROUP, "use_sharded_state"))


def metadata_of(module: Any) -> dict[str, Any]:
    """get_shard_metadata() in plain types, by which shards are put together."""
    from ctrainer.fsdp.shard_files import plain

    metadata: dict[str, Any] = plain(module.get_shard_metadata())
    return metadata


def parameter_names(module: Any) -> list[str]:
    """The names of the whole parameters, in the order in which
    get_shard_from_optim_state_dict() numbers them."""
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
            "shards together with ctrainer consolidate"
        )
    module.load_local_state_dict(state["model"])


def norm_of_all(communicator: _C.Communicator) -> Callable[[Any], Any]:
    """From the norm of a process's gradients to that of all, each having a part."""

    def aggregate(norm: Any) -> Any:
        total = norm.double().square().reshape(1)
        communicator.all_reduce(total, "sum")
        return total.sqrt()

    return aggregate


# --zero-sharding os: each worker keeps the state of the parameters that it updates.
#
# Source: fairseq, fairseq/optim/shard.py and fairseq/trainer.py.


def shards_optimizer_state(cfg: Any) -> bool:
    return bool(setting(cfg, _GROUP, "zero_sharding") == "os")


def sharded_optimizer(
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


def check_zero(cfg: Any) -> None:
    """Raise ValueError for options that --zero-sharding os excludes."""
    word = setting(cfg, _GROUP, "zero_sharding", "none")
    if word not in ("none", "os"):
        raise ValueError(f"{_GROUP}.zero_sharding is {word!r}; expected none or os")
    if word == "none":
        return
    apart = ": between exchanges each worker updates a model of its own"
    one = ", which shards the state of one optimizer"
    for group, name, value, option, why in (
        ("optimization", "use_bmuf", True, "--use-bmuf", apart),
        (_GROUP, "ddp_backend", "slowmo", "--ddp-backend=slowmo", apart),
        ("optimizer", "_name", "composite", "--optimizer composite", one),
    ):
        if setting(cfg, group, name) == value:
            raise ValueError(f"{option} does not go with --zero-sharding os{why}")
    names = ("fp16", "memory_efficient_fp16", "fp16_no_flatten_grads")
    fp16, in_place, separate = (setting(cfg, "common", name) for name in names)
    if fp16 and not in_place and not separate:
        raise ValueError(
            "ZeRO is incompatible with fp16 and flattened grads. Please use "
            "--fp16-no-flatten-grads"
        )


# fairseq's moving average of a model that is sharded: each process has a part.


class ShardedEMA(EMA):
    """EMA whose averages are shards, of float32 whatever the model computes in.

    average: a copy of the model before it was sharded, sharded in the same way; it is
    the model that get_model() gives, whose state_dict() is whole and whose forward all
    processes call. model: the sharded one.
    """

    def __init__(self, average: Any, model: Any, config: Any) -> None:
        self.config, self.model = config, average
        self.decay = float(config.ema_decay)
        self._follow(model)
        seed = getattr(config, "ema_seed_model", None)
        if seed:
            average.load_state_dict(tools.load_file(seed)["model"], strict=True)
        else:  # the model may have been updated since it was copied
            weights = tools.floats_of(self._weights.state_dict())
            tools.copy_others(self._averages, self._weights, weights)

    @property
    def fp32_params(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole averages that are floats. Collective."""
        return tools.floats_of(self.model.state_dict())

    def step(self, new_model: Any, updates: int) -> None:
        """Average this process's shards after update number `updates`, if due."""
        super().step(self._source, updates)

    def restore(
        self, state_dict: dict[str, Any], build_fp32_params: bool = False
    ) -> None:
        """Take this process's part out of whole averages."""
        self.model.load_state_dict(state_dict, strict=False)

    def reverse(self, model: Any) -> Any:
        raise ValueError(
            "the averages are sharded, and no process has a whole model for them: load "
            "get_model().state_dict(), which all processes call"
        )

    def _follow(self, model: Any) -> None:
        self._source = model
        self._averages, self._weights = _Shards(self.model), _Shards(model)
        names, values = tools.averaged_tensors(self._weights)
        self._begin(values, tools.tensors_named(self._averages, names))

    def _copy_others(self, new_model: Any) -> None:
        tools.copy_others(self._averages, self._weights, {})


class _Shards:
    """A process's own part of a sharded module, as the state of a module."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:
        state: dict[str, Any] = self._module.local_state_dict(keep_vars=keep_vars)
        return state
