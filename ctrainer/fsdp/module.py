"""FullyShardedDataParallel: a module whose parameters are sharded over ranks."""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ctrainer.fsdp import _full, _layout, _metadata, _options
from ctrainer.fsdp._buffers import cast_buffers
from ctrainer.fsdp._tensors import cast_floats
from ctrainer.fsdp.flatten import FlattenParamsWrapper
from ctrainer.fsdp.state import TrainingState
from ctrainer.fsdp.unit import Unit

__all__ = ["FullyShardedDataParallel", "XlaFullyShardedDataParallel"]


class FullyShardedDataParallel(nn.Module):
    """A module of whose parameters each rank keeps a part.

    They are gathered for the forward and the backward and released after each; the
    gradients are averaged, and each rank keeps those of its part, on which any
    optimizer works. It is made after wrapping: parameters() yields the shards, of
    float32. Wrap inner modules first and then those around them: a unit shards what
    is below it and not sharded yet. All ranks build and call the same.

    module: on the CPU, its parameters float32 and the same on every rank.
    reshard_after_forward: release the parameters after the forward and gather them
    again for the backward. flatten_parameters: the trainable parameters as one row and
    the frozen ones as another, rather than each by itself. disable_reshard_on_root: the
    outermost unit keeps its parameters from the forward to the backward.
    compute_dtype: float32, float16 or bfloat16, of parameters and inputs; buffer_dtype:
    of buffers, by default the same. fp32_reduce_scatter: gradients are reduced in
    float32 whatever compute_dtype. sharding_groups: lists of ranks that share, with
    sharding_rank and sharding_world_size of this one; or a Communicator. on_neuron:
    shard each parameter by its rows, which the ranks have to divide;
    shard_param_on_dim_0: the same, padded; without either each is flattened and padded
    to a multiple of _shard_size_multiple elements a rank. process_group: a Communicator
    or a group of torch.distributed; by default ctrainer.comm.world().

    What only a compiler or a TPU needs has nothing to do here: the optimization
    barriers, pin_layout, coalesce_all_gather_ops, reduce_scatter_bucket_size_mb and
    _use_xla_patched_linear. execute_sharding_on_init collects garbage, so that the
    full parameters are gone. _debug_dummy_all_gather_op and its like leave the other
    ranks out; watch_released ends the process where a parameter is used that is not
    gathered, rather than reading zeros.

    Raises RuntimeError for a module that is wrapped already or has no forward,
    ValueError for dtypes and groups that make no sense, TypeError for parameters that
    are not float32, AssertionError for rows that the ranks do not divide.

    Source: torch_xla's XlaFullyShardedDataParallel, whose names, files and states it
    has; Rajbhandari et al., "ZeRO", 2020.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        mark_step_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | str | None = None,
        buffer_dtype: torch.dtype | str | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Any = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        on_neuron: bool = True,
        _shard_size_multiple: int = 128,
        _pin_layout_in_all_reduce: bool = False,
        _pin_layout_in_all_gather: bool = False,
        _pin_layout_in_reduce_scatter: bool = False,
        _debug_dummy_forward_pass: bool = False,
        _debug_msg: str = "xla_fsdp",
        _debug_print: bool = False,
        _debug_dummy_all_gather_op: bool = False,
        _debug_dummy_all_reduce_op: bool = False,
        _debug_dummy_reduce_scatter_op: bool = False,
        _debug_dummy_optimization_barrier_op: bool = False,
        *,
        sync_on_finalization: bool = False,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        reduce_scatter_bucket_size_mb: int = 0,
        coalesce_all_gather_ops: bool = False,
        auto_wrap_policy: Any = None,
        auto_wrapper_callable: Any = None,
        param_init_fn: Any = None,
        _use_xla_patched_linear: bool = True,
        process_group: Any = None,
        watch_released: bool = False,
    ) -> None:
        _options.check_module(module, FullyShardedDataParallel)
        super().__init__()
        self.compute_dtype = _options.float_dtype(
            "compute_dtype", compute_dtype, torch.float32
        )
        self.buffer_dtype = _options.float_dtype(
            "buffer_dtype", buffer_dtype, self.compute_dtype
        )
        self._orig_reshard_after_forward = reshard_after_forward
        self.disable_reshard_on_root = disable_reshard_on_root
        self.flatten_parameters = flatten_parameters
        self.mark_step_on_finalization = (
            mark_step_on_finalization or sync_on_finalization
        )
        self.fp32_reduce_scatter = fp32_reduce_scatter
        self.sharding_groups = sharding_groups
        self.on_neuron = on_neuron
        self._debug_dummy_forward_pass = _debug_dummy_forward_pass
        self._debug_dummy_all_reduce_op = _debug_dummy_all_reduce_op
        self._debug_msg, self._debug_print = _debug_msg, _debug_print
        self.communicator = _options.communicator_of(
            process_group, sharding_groups, sharding_rank, sharding_world_size
        )
        self.rank = self.communicator.rank
        self.world_size = self.communicator.world_size
        self._sharding = _layout.Sharding(
            self.rank,
            self.world_size,
            _shard_size_multiple,
            on_dim_0=on_neuron or shard_param_on_dim_0,
            pads=shard_param_on_dim_0,
        )
        if auto_wrap_policy is not None:
            _options.wrap_children(
                module, auto_wrap_policy, auto_wrapper_callable or self._inner_like
            )
        if param_init_fn is not None:
            _options.materialize(module, param_init_fn)
        _options.check_parameters(module)
        self._wrap(module)
        self._unit = self._make_unit(
            watch_released, _debug_dummy_all_gather_op, _debug_dummy_reduce_scatter_op
        )
        del module
        self._share_out()
        cast_buffers(self, self.buffer_dtype)
        for name, param in self.named_parameters():
            assert hasattr(param, "_is_sharded"), (
                f"found unsharded parameter: {name} ; {param.size()}"
            )
        self._reset_lazy_init()
        hooked: Any = self  # this has no types in torch
        hooked.register_load_state_dict_post_hook(_after_load)
        if execute_sharding_on_init:
            gc.collect()
            if not on_neuron:
                self.communicator.barrier()

    # ---- construction

    def _wrap(self, module: nn.Module) -> None:
        """The wrapped module and its groups; flat ones are in front."""
        params = [p for p in module.parameters() if not hasattr(p, "_is_sharded")]
        flat = [
            [p for p in params if self.flatten_parameters and p.requires_grad == needs]
            for needs in (True, False)
        ]
        self._fsdp_wrapped_module = FlattenParamsWrapper(
            module, flat, auto_unflatten_state_dict=False, _flatten=False
        )
        groups = [
            _layout.under(group, "_fsdp_wrapped_module")
            for group in self._fsdp_wrapped_module._groups
        ]
        if not self.flatten_parameters:
            groups += [_layout.lone_group(e) for e in _layout.entries_of(self, params)]
        for group in groups:
            self._sharding.fit(group)
        self._groups = groups

    def _make_unit(self, watched: bool, lone_gather: bool, lone_reduce: bool) -> Unit:
        low = not self.fp32_reduce_scatter
        reduce_dtype = self.compute_dtype if low else torch.float32
        unit = Unit(
            self.communicator,
            tuple((group.size, group.requires_grad) for group in self._groups),
            compute_dtype=str(self.compute_dtype).removeprefix("torch."),
            reduce_dtype=str(reduce_dtype).removeprefix("torch."),
            watched=watched,
            lone_gather=lone_gather,
            lone_reduce=lone_reduce,
        )
        unit.owner = weakref.ref(self)
        factor = _options.predivide_factor(self.world_size)
        unit.divide_factors = (factor, self.world_size / factor)
        return unit

    def _share_out(self) -> None:
        """Each rank keeps its part; the parameters become the unit's memory."""
        shards = [self._sharding.shard_of(group) for group in self._groups]
        self.sharded_params: list[Any] = shards
        for group, shard in zip(self._groups, self.sharded_params, strict=True):
            self.register_parameter(shard._name, shard)
            for entry in group.entries:
                assert not hasattr(entry.param, "_is_sharded")
                entry.param._sharded_param = shard
        self._unit.shards = self.sharded_params
        _layout.replace_parameters(self._unit, self._groups, self.compute_dtype)

    def _inner_like(self, module: nn.Module) -> FullyShardedDataParallel:
        """A child that auto_wrap_policy chooses, with the options of this one."""
        return FullyShardedDataParallel(
            module,
            reshard_after_forward=self._orig_reshard_after_forward,
            flatten_parameters=self.flatten_parameters,
            execute_sharding_on_init=False,
            compute_dtype=self.compute_dtype,
            buffer_dtype=self.buffer_dtype,
            fp32_reduce_scatter=self.fp32_reduce_scatter,
            on_neuron=self.on_neuron,
            shard_param_on_dim_0=self._sharding.pads,
            _shard_size_multiple=self._sharding.multiple,
            process_group=self.communicator,
        )

    # ---- what it is made of

    @property
    def module(self) -> FlattenParamsWrapper:
        """The wrapped module, whose attributes are found here too."""
        assert isinstance(self._fsdp_wrapped_module, FlattenParamsWrapper)
        return self._fsdp_wrapped_module

    @property
    def full_params(self) -> list[torch.Tensor]:
        """The wrapped module's own parameters, which hold values while gathered."""
        return [entry.param for group in self._groups for entry in group.entries]

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """[p for p in self.parameters() if p.grad is not None]"""
        return [p for p in self.parameters() if p.grad is not None]

    @property
    def training_state(self) -> TrainingState:
        return TrainingState(self._unit.state)

    @training_state.setter
    def training_state(self, state: TrainingState) -> None:
        self._unit.state = state.value

    @property
    def has_full_params(self) -> bool:
        """Whether the parameters are gathered."""
        return self._unit.gathered

    @property
    def reshard_after_forward(self) -> bool:
        return self._unit.reshard_after_forward

    @reshard_after_forward.setter
    def reshard_after_forward(self, value: bool) -> None:
        self._unit.reshard_after_forward = value

    @property
    def _require_backward_grad_sync(self) -> bool:
        return self._unit.require_sync

    @property
    def gradient_predivide_factor(self) -> float:
        return self._unit.divide_factors[0]

    @property
    def gradient_postdivide_factor(self) -> float:
        return self._unit.divide_factors[1]

    def units(self) -> list[FullyShardedDataParallel]:
        """Those below and this one, in the order of modules()."""
        return [m for m in self.modules() if isinstance(m, FullyShardedDataParallel)]

    def extra_repr(self) -> str:
        return (
            f"world_size={self.world_size}, rank={self.rank}, "
            f"compute_dtype={self.compute_dtype}, buffer_dtype={self.buffer_dtype}, "
            f"flatten_parameters={self.flatten_parameters}, "
            f"reshard_after_forward={self.reshard_after_forward}, "
            f"sharding_groups={self.sharding_groups}"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        return self.module[key]

    # ---- roots

    def _reset_lazy_init(self) -> None:
        """Let the next forward find out anew which unit is the outermost."""
        self._is_root: bool | None = None
        self._unit.forget_root()
        self.reshard_after_forward = self._orig_reshard_after_forward

    def _lazy_init(self) -> None:
        """The first unit that is called is the root of those below it."""
        if self._is_root is not None:
            return
        self._is_root = True
        self.assert_state(TrainingState.IDLE)
        for unit in self.units():
            if unit is not self:
                assert unit._is_root is None or not unit._is_root
                unit._is_root = False
        self._unit.set_units([unit._unit for unit in self.units()])
        if self.disable_reshard_on_root:
            self.reshard_after_forward = False

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise ValueError unless the unit is in one of the states."""
        states = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state in states:
            return
        message = (
            f"expected to be in states {states} but current state is "
            f"{self.training_state}"
        )
        if self.rank == 0:  # an exception in a hook of autograd may not be shown
            print(f"Asserting FSDP instance is: {self}")
            print(f"ERROR: {message}")
            traceback.print_stack()
        raise ValueError(message)

    def _assert_idle(self) -> None:
        self._unit.recover()
        self.assert_state(TrainingState.IDLE)

    # ---- forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._lazy_init()
        if self.compute_dtype != torch.float32:
            args, kwargs = cast_floats(self.compute_dtype, (args, kwargs))
        run = self._dummy_forward if self._debug_dummy_forward_pass else self.module
        return self._unit.forward(run, args, kwargs)

    def _dummy_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sum of the means of all inputs and parameters, of inner units too."""
        recursive = kwargs.pop("_xla_fsdp_dummy_forward_resursive", True)
        out = torch.zeros(1)
        for tensor in (*args, *kwargs.values(), *self.full_params):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                out = out + tensor.mean()
        for unit in self.units()[1:] if recursive else ():
            own, unit._debug_dummy_forward_pass = unit._debug_dummy_forward_pass, True
            out = unit(out, _xla_fsdp_dummy_forward_resursive=False)
            unit._debug_dummy_forward_pass = own
        return out

    def _end_of_backward(self) -> None:
        try:
            self._unit.finish()
        except Exception as e:
            print(
                "Exception below occurred in post-backward (_debug_msg: "
                f"{self._debug_msg}). This is often due to some inner FSDP modules not "
                "being used in an outer FSDP module's forward pass. Please make sure "
                "that all inner FSDP modules participate in the forward pass when "
                f"using nested FSDP.\n{type(e).__name__}: {e}"
            )
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients stay on their rank, full-size and in float32.

        The first backward outside reduces the sum. Raises AssertionError on an inner
        unit, ValueError in the middle of a forward or backward.
        """
        self._lazy_init()
        assert self._is_root, "no_sync on inner FSDP is not supported"
        self._assert_idle()
        before = [(unit._unit, unit._unit.require_sync) for unit in self.units()]
        for unit, _ in before:
            unit.require_sync = False
        try:
            yield
        finally:
            for unit, required in before:
                unit.require_sync = required

    def set_gradient_divide_factors(
        self, pre: float, post: float, recursive: bool
    ) -> None:
        """Divide gradients by pre before their sum over the ranks and by post after.

        recursive: those of inner units too. By default pre * post is the number of
        ranks.
        """
        self._assert_idle()
        for unit in self.units() if recursive else [self]:
            unit.assert_state(TrainingState.IDLE)
            unit._unit.divide_factors = (float(pre), float(post))

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        groups: Any = None,
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all ranks is at most max_norm.

        norm_type: p > 0, or inf, also as a string. groups: the group is the unit's own;
        another is refused. Returns the norm that it was, a float32 scalar. Collective.
        Raises AssertionError where this is not the root of a forward.
        """
        assert self._is_root, (
            "clip_grad_norm should only be called on the root (parent) instance"
        )
        self._assert_idle()
        if groups is not None and groups != self.sharding_groups:
            raise ValueError(
                "groups must be the sharding_groups of the unit or None: its shards "
                "lie on these ranks"
            )
        total = self._unit.clip(
            self.params_with_grad, float(max_norm), float(norm_type)
        )
        return torch.tensor(total, dtype=torch.float32)

    # ---- the full parameters

    @contextlib.contextmanager
    def summon_full_params(
        self, recurse: bool = True, writeback: bool = True
    ) -> Iterator[None]:
        """Within it the module's parameters have all their values, in float32.

        recurse: those of inner units too. writeback: what is changed, alike on all
        ranks, goes into the shards at the end. Collective.
        """
        self._assert_idle()
        with _full.summoned(self.units() if recurse else [self], writeback):
            yield

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """What the unwrapped module's state_dict() would be, a copy. Collective."""
        self._assert_idle()
        return _full.state_dict(self, self.units())

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Take every rank's part out of the unwrapped module's state_dict().

        Raises RuntimeError naming the keys that are missing or unknown (strict) and
        parameters of other shapes; nothing is loaded then.
        """
        self._assert_idle()
        _full.load_state_dict(self, self.units(), state, strict)

    # ---- names and metadata

    def get_original_names_and_sharded_parameters(
        self,
    ) -> list[tuple[str, nn.Parameter]]:
        """Like named_parameters(), with the names before wrapping."""
        return [
            (_metadata.original_name(_metadata.join(name, shard._orig_name)), shard)
            for name, unit in self.named_modules()
            if isinstance(unit, FullyShardedDataParallel)
            for shard in unit.sharded_params
        ]

    def get_shard_metadata(self) -> dict[str, Any]:
        """What consolidate_sharded_model_checkpoints needs beside the shards.

        shard_info: by unit, for each shard the size and the name of what it is part
        of; flatten_info: for each flat parameter (names, shapes, numels); buffer_info:
        the dtypes that buffers had; shared_info: the other names of tied parameters;
        world_size and rank.
        """
        return _metadata.shard_metadata(self, FullyShardedDataParallel)


XlaFullyShardedDataParallel = FullyShardedDataParallel


def _after_load(module: Any, incompatible: object) -> None:
    """What was gathered is old, and shards may have been assigned."""
    shards = [module._parameters[shard._name] for shard in module.sharded_params]
    for shard, group in zip(shards, module._groups, strict=True):
        _layout.mark(shard, group)
    module.sharded_params = module._unit.shards = shards
    module._unit.release()
