"""fairscale's FullyShardedDataParallel: its constructor and its full state_dict."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ctrainer.compat.fairscale import _optim_state
from ctrainer.compat.fairscale._groups import communicator_of
from ctrainer.compat.fairscale._wrap import (
    auto_wrap,
    config_auto_wrap_policy,
    enable_wrap,
)
from ctrainer.fsdp import FullyShardedDataParallel as Engine
from ctrainer.fsdp._tensors import cast_floats


class FullyShardedDataParallel(Engine):
    """ctrainer.fsdp.FullyShardedDataParallel under fairscale's arguments and habits.

    process_group: a Communicator, a group of torch.distributed or None for all ranks.
    mixed_precision: compute in compute_dtype, float16 if None; buffers in buffer_dtype,
    by default the same. fp32_reduce_scatter: reduce gradients in float32.
    flatten_parameters: a flat parameter for what is trained and one for what is frozen.
    move_params_to_cpu, cpu_offload, move_grads_to_cpu, compute_device and
    state_dict_device: everything is in host memory; another device is refused.
    gradient_predivide_factor: what gradients are divided by before their sum.
    state_dict_on_rank_0_only: state_dict() is empty on other ranks.
    process_group_reduce_scatter, bucket_cap_mb, no_broadcast_optim_state,
    clear_autocast_cache and verbose have nothing to do. force_input_to_fp32: a unit of
    float32 casts its floating point inputs. allow_reset_parameters=True
    is refused.

    state_dict() and load_state_dict() are those of the unwrapped module, collective;
    local_state_dict() and load_local_state_dict() are this rank's shards, in
    XlaFullyShardedDataParallel's format.

    Raises ValueError for fp32_reduce_scatter without mixed_precision, for a device
    other than the CPU and for allow_reset_parameters; else what the engine raises.

    Source: fairscale 0.4.13, fairscale/nn/data_parallel.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        _check(mixed_precision, fp32_reduce_scatter, compute_device, state_dict_device)
        if allow_reset_parameters:
            raise ValueError(
                "allow_reset_parameters=True: reset parameters before they are "
                "sharded, or load a state_dict"
            )
        half = torch.float16 if mixed_precision else torch.float32
        super().__init__(
            module,
            reshard_after_forward,
            flatten_parameters,
            disable_reshard_on_root=disable_reshard_on_root,
            compute_dtype=compute_dtype or half,
            buffer_dtype=buffer_dtype,
            fp32_reduce_scatter=fp32_reduce_scatter,
            on_neuron=False,
            _shard_size_multiple=1,
            process_group=communicator_of(process_group),
        )
        self.process_group = process_group
        self.mixed_precision = mixed_precision
        self.move_params_to_cpu = move_params_to_cpu or cpu_offload
        self.force_input_to_fp32 = force_input_to_fp32
        self.state_dict_on_rank_0_only = state_dict_on_rank_0_only
        self._locally = False
        if gradient_predivide_factor is not None:
            after = self.world_size / gradient_predivide_factor
            self.set_gradient_divide_factors(gradient_predivide_factor, after, False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.force_input_to_fp32 and self.compute_dtype == torch.float32:
            args, kwargs = cast_floats(torch.float32, (args, kwargs))
        return super().forward(*args, **kwargs)

    @property
    def cpu_offload(self) -> bool:
        return self.move_params_to_cpu

    def extra_repr(self) -> str:
        return (
            f"world_size={self.world_size}, "
            f"flatten_parameters={self.flatten_parameters}, "
            f"mixed_precision={self.mixed_precision}"
        )

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        filter_params_fn: Callable[[Any], Any] | None = None,
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all ranks is at most max_norm;
        return what it was. Collective.

        filter_params_fn: which of this rank's parameters count, and are scaled.
        """
        if filter_params_fn is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        assert self._is_root, (
            "clip_grad_norm should only be called on the root (parent) instance"
        )
        chosen = list(filter_params_fn(self.params_with_grad))
        total = self._unit.clip(chosen, float(max_norm), float(norm_type))
        return torch.tensor(total, dtype=torch.float32)

    @contextlib.contextmanager
    def summon_full_params(
        self, recurse: bool = True, volatile: bool = False
    ) -> Iterator[None]:
        """Within it the module's parameters have all their values. Collective.

        recurse: those of inner units too. volatile: changes are dropped at the end.
        """
        with super().summon_full_params(recurse, writeback=not volatile):
            yield

    # ---- the model's state

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        """The unwrapped module's state_dict, on every rank. Collective."""
        if self._locally:
            state: dict[str, Any] = super().state_dict(
                *args, destination=destination, prefix=prefix, **kwargs
            )
            return state
        full = self.full_state_dict()
        found = OrderedDict() if destination is None else destination
        if self.rank == 0 or not self.state_dict_on_rank_0_only:
            found.update({prefix + name: value for name, value in full.items()})
        return found

    def load_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any], strict: bool = True
    ) -> _IncompatibleKeys:
        """Take this rank's part out of the unwrapped module's state_dict. Collective.

        Raises RuntimeError naming the keys that are missing or unknown (strict) and
        parameters of other shapes; nothing is loaded then.
        """
        own = set(self.full_state_dict())
        self.load_full_state_dict(state_dict, strict)
        return _IncompatibleKeys(
            sorted(own - set(state_dict)), sorted(set(state_dict) - own)
        )

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's shards."""
        with self._as_local():
            return FullyShardedDataParallel.state_dict(self, *args, **kwargs)

    def load_local_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True
    ) -> _IncompatibleKeys:
        """Take what local_state_dict() returned on this rank."""
        loaded: _IncompatibleKeys = super().load_state_dict(state_dict, strict)
        return loaded

    @contextlib.contextmanager
    def _as_local(self) -> Iterator[None]:
        units = get_fsdp_instances(self)
        for unit in units:
            unit._locally = True
        try:
            yield
        finally:
            for unit in units:
                unit._locally = False

    # ---- the optimizer's state

    def gather_full_optim_state_dict(
        self, optim: torch.optim.Optimizer, **ignored: Any
    ) -> dict[str, Any] | None:
        """The state of whole parameters, on rank 0; None elsewhere. Collective.

        state: by number of parameter, units in the order of modules() and each one's
        parameters in order; param_groups: by these numbers; param_id_map: number ->
        that of the shard; uncollected_local_ids: [].

        Raises ValueError for a state that has not the shape of its shard and differs
        between ranks, or parameters that are not this module's.
        """
        return _optim_state.gather(self, optim)

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """This rank's part of what gather_full_optim_state_dict returned, on any
        number of ranks, for load_state_dict of the optimizer. It is not changed.

        Raises AssertionError where the units are others.
        """
        return _optim_state.shard(self, full_optim_state_dict)


def _check(
    mixed_precision: bool, fp32_reduce_scatter: bool, *devices: torch.device | None
) -> None:
    if fp32_reduce_scatter and not mixed_precision:
        raise ValueError("fp32_reduce_scatter requires mixed_precision=True")
    for device in devices:
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(
                f"compute_device and state_dict_device must be the CPU, not {device}: "
                "units are in host memory"
            )


def get_fsdp_instances(
    mod: nn.Module, skip_empty: bool = False
) -> list[FullyShardedDataParallel]:
    """The units among the modules of mod; skip_empty: those with parameters."""
    units = [m for m in mod.modules() if isinstance(m, FullyShardedDataParallel)]
    return [unit for unit in units if unit.sharded_params or not skip_empty]


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Any = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap each batch normalisation by itself, in float32 and not resharded, and
    return the module.

    fsdp_config: other options of these units. wrap_it=False only leaves
    `wrapper_config` on them, for auto_wrap(). single_rank_pg: units of one rank.

    Raises AssertionError for a module that has a wrapper_config (assert_on_collision).
    """
    config = fsdp_config
    if config is None:
        config = {
            "process_group": _alone() if single_rank_pg else process_group,
            "mixed_precision": False,
            "flatten_parameters": False,
            "reshard_after_forward": False,
            "force_input_to_fp32": False,
        }
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            assert not (assert_on_collision and hasattr(child, "wrapper_config")), (
                "a batch normalisation has a wrapper_config already"
            )
            child.wrapper_config = config  # type: ignore[assignment]
    if not wrap_it:
        return module
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
        return auto_wrap(module)


def _alone() -> Any:
    from ctrainer import _C

    return _C.Communicator()
