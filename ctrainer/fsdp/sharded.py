"""ShardedModule: a module whose parameters a unit has taken over; its parts."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.multiprocessing.reductions import StorageWeakRef

from ctrainer import _C
from ctrainer.arguments.settings import reject_keywords
from ctrainer.fsdp import (
    changes,
    initial_values,
    layout,
    options,
    shard_files,
    torch_guards,
)
from ctrainer.fsdp.flatten import FlattenParamsWrapper
from ctrainer.fsdp.layout import pinned_zeros, tensor_over


class TrainingState(Enum):
    """Where a unit is in a step: outside of its forward and backward pass, in its
    forward pass, in its backward pass before and after the first gradient of one of its
    parameters, or in summon_full_params().

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FullyShardedDataParallel
        >>> FullyShardedDataParallel(torch.nn.Linear(4, 2)).training_state
        <TrainingState.IDLE: 1>
    """

    IDLE = 1
    FORWARD = 2
    BACKWARD_PRE = 3
    BACKWARD_POST = 4
    SUMMON_FULL_PARAMS = 5


class Unit(_C.FSDPUnit):
    """The engine of one module, with the hooks that need torch."""

    owner: Callable[[], Any]  # a weak reference to the module
    path = ""  # of the module, from its root

    is_grad_enabled = staticmethod(torch.is_grad_enabled)
    _current_graph_task_id = staticmethod(torch._C._current_graph_task_id)
    _current_autograd_node = staticmethod(torch._C._current_autograd_node)
    _get_sequence_nr = staticmethod(torch._C._autograd._get_sequence_nr)

    def _queue(self) -> Callable[[], Any]:
        """Call the module's _end_of_backward() when the current backward ends.

        Returns a weak reference to the callback, which autograd drops when the backward
        has ended, with an exception or without.
        """
        end = self.owner()._end_of_backward
        Variable._execution_engine.queue_callback(end)
        return weakref.ref(end)

    def _new_gradient(self, group: int) -> torch.Tensor:
        shard = self.shards[group]
        if self.gradients is None:
            return torch.zeros(shard.shape, dtype=shard.dtype, device=shard.device)
        # Pinning takes long: the memory of a gradient that is gone is the next one's.
        memory, last = self.gradients.get(group, (None, None))
        if last is None or not last.expired():
            memory = pinned_zeros(shard.nbytes, self.owner().home.plugin)
        grad = tensor_over(memory, shard.dtype, 0, shard.shape)
        weak: Any = StorageWeakRef  # has no types in torch
        self.gradients[group] = memory, weak(grad.untyped_storage())
        return grad

    def _settle_trained(self) -> tuple[bool, ...]:
        return changes.settle(self.owner())

    def _check_parameters(self, changed: int) -> None:
        """The one at this index of the attributes; below 0 all of them."""
        if changed < 0:
            changes.compare_gathered(self.owner())
        else:
            changes.restore(self.owner(), changed)

    def _check_order(self, what: str) -> None:
        """Raise ValueError on all ranks unless they are at the same unit."""
        own = f"{what} {self.path!r}" if self.path else f"{what} the root"
        answers = self.communicator.gather_bytes(own.encode())
        texts = [answer.decode() for answer in answers]
        if any(text != own for text in texts):
            each = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(texts))
            raise ValueError(
                f"ranks use different units, or in different orders: {each}. All ranks "
                "have to call the same modules in the same order"
            )

    def assert_state(self, states: list[int]) -> None:
        self.owner().assert_state([TrainingState(state) for state in states])


def cast_buffers(root: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating point buffers below root, inner units' too, and keep their
    first dtype in `_orig_dtype`."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                cast: Any = buffer.to(dtype)
                cast._orig_dtype = getattr(buffer, "_orig_dtype", buffer.dtype)
                setattr(module, name, cast)


# Copies of sharded modules.


M = TypeVar("M")
Init = TypeVar("Init", bound=Callable[..., None])


@contextlib.contextmanager
def _without_memory(unit: Any) -> Iterator[None]:
    """Within it full parameters are expanded from one element: no memory is copied."""
    own = [entry.param for group in unit._groups for entry in group.entries]
    homes = [(p, p.data) for p in [*own, *(p for _, p in unit.borrowed)]]
    for param, home in homes:
        one = torch.zeros((), dtype=home.dtype, device=home.device)
        param.data = one.expand(home.shape)
    try:
        yield
    finally:
        for param, home in homes:
            param.data = home


# Attributes that a copy makes anew: its engine, and the owners of borrowed parameters.
_OF_THE_ENGINE = {"_unit", "_hooks", "_owner_modules", "_shard_file"}


def deep_copy(unit: M, memo: dict[int, Any]) -> M:
    """A copy of a unit and of all below it.

    Raises ValueError in the middle of a forward or backward.
    """
    source: Any = unit
    source._assert_idle()
    made: Any = object.__new__(type(source))
    memo[id(source)] = made
    for shared in (source.communicator, *source._host_groups, source.home):
        memo[id(shared)] = shared
    if "_owner_modules" in source.__dict__:
        made.__dict__["_owner_modules"] = None
    with _without_memory(source):
        for name, value in source.__dict__.items():
            if name not in _OF_THE_ENGINE:
                made.__dict__[name] = copy.deepcopy(value, memo)
    for shard, group in zip(made.sharded_params, made._groups, strict=True):
        made._sharding.mark(shard, group)
    made._move_shards()
    _settle(made, source._unit)
    return made  # type: ignore[no-any-return]


def move(unit: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> None:
    """Take a unit, and all below it, to another device, as module.to(device) does with
    what it calls for each tensor. The shards stay the same objects. Collective where
    the device is a GPU.

    Raises ValueError in the middle of a forward or backward, RuntimeError for shards
    that are not where the unit computes, and gradients that are not reduced.
    """
    unit._assert_idle()
    if unit._offloads:
        raise RuntimeError(
            "a unit with cpu_offload or shard_folder cannot be moved: move the module "
            "before it is wrapped, or pass device_id"
        )
    if unit._unit.holds_grads:
        raise RuntimeError(
            "the unit has gradients of no_sync() that are not reduced: move it after "
            "the backward that reduces them"
        )
    home = options.at(fn(torch.empty(0, device=unit.home.device)).device)
    modules = list(unit.modules()) if recurse else [unit]
    buffers = [(b, m, n) for m in modules for n, b in m.named_buffers(recurse=False)]
    apply_to_each: Any = nn.Module._apply
    apply_to_each(unit, fn, recurse)
    for before, module, name in buffers:  # as cast_buffers() keeps it
        if hasattr(before, "_orig_dtype"):
            getattr(module, name)._orig_dtype = before._orig_dtype
    for shard in unit.sharded_params:
        if shard.device != home.device:  # its views are in the modules' tables
            shard.data = fn(shard.data)
    unit._live_in(home)
    _settle(unit, unit._unit)


def _settle(made: Any, source: Unit) -> None:
    """Give a copy, or a unit that was moved, an engine like its source's."""
    views = made.__dict__.get("_views")
    made._set_shards()
    if views is not None:
        layout.adopt(made, views)
        made._watched = changes.watched(made)
        made._attributes = changes.attributes(made)
    made._unit.divide_factors = source.divide_factors
    made._unit.require_sync = source.require_sync
    residual = residual_of(made._unit)
    if residual is not None:
        residual.copy_(residual_of(source))
    made._reset_lazy_init()


def residual_of(unit: Unit) -> Any:
    """The error-feedback residual over a unit's memory, float32, or None."""
    memory = unit.residual
    if memory is None:
        return None
    size = torch.Size([memory.nbytes // torch.float32.itemsize])
    return tensor_over(memory, torch.float32, 0, size)


# Longer blocks would leave holes in the heap that few other blocks fit. A tensor of
# 1 MiB, with the headers of torch and malloc, must be kept: the next tensor would take
# new pages, zeroed by the system.
_KEPT_BYTES = (1 << 20) + (1 << 16)


def _recycles() -> bool:
    """Let torch's blocks and units share memory, or else malloc return long blocks.

    Blocks made before stay malloc's.
    """
    recycles = _C.recycle_blocks("libc10.so")
    if not recycles:
        _C.malloc_keep(_KEPT_BYTES)
    return recycles


# Options of a unit that the units of auto_wrap_policy below have too.
_INHERITED = (
    "flatten_parameters", "use_orig_params", "gather_bits", "reduce_bits",
    "error_feedback", "forward_prefetch", "backward_prefetch", "compute_dtype",
    "buffer_dtype", "fp32_reduce_scatter", "on_neuron", "secondary_shards",
    "shard_folder", "read_ahead", "device_id",
)  # fmt: skip


def _checks_keywords(init: Init) -> Init:
    """The constructor, which names an unknown keyword by the class that users call."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        reject_keywords(type(self).__name__, init, kwargs)
        init(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


class ShardedModule(nn.Module):
    """FullyShardedDataParallel before it is called: see there."""

    @_checks_keywords
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
        sync_module_states: bool = False,
        _use_xla_patched_linear: bool = True,
        process_group: Any = None,
        device_mesh: Any = None,
        replica_groups: Any = None,
        use_orig_params: bool = False,
        gather_bits: int | None = None,
        reduce_bits: int | None = None,
        error_feedback: bool = True,
        forward_prefetch: bool | None = None,
        backward_prefetch: Any = "AUTO",
        cpu_offload: Any = False,
        watch_released: bool = False,
        return_memory: bool = True,
        secondary_shards: int | None = None,
        shard_folder: str | os.PathLike[str] | None = None,
        read_ahead: int = 5,
        block_size: int | None = None,
        device_id: torch.device | int | str | None = None,
    ) -> None:
        options.check_module(module, ShardedModule)
        options.check_flags(ShardedModule.__init__, locals())
        super().__init__()
        self.compute_dtype = options.float_dtype("compute_dtype", compute_dtype)
        self.buffer_dtype = options.float_dtype("buffer_dtype", buffer_dtype)
        self._orig_reshard_after_forward = reshard_after_forward
        self.disable_reshard_on_root = disable_reshard_on_root
        self.flatten_parameters = flatten_parameters
        self.use_orig_params = use_orig_params
        self.mark_step_on_finalization = (
            mark_step_on_finalization or sync_on_finalization
        )
        self.fp32_reduce_scatter = fp32_reduce_scatter
        self.gather_bits, self.reduce_bits = gather_bits, reduce_bits
        self.error_feedback = error_feedback
        self.secondary_shards = secondary_shards
        self._prefetches = (
            options.forward_prefetch(forward_prefetch),
            options.backward_prefetch(backward_prefetch),
        )
        self.forward_prefetch, self.backward_prefetch = self._prefetches
        self.shard_folder, self.read_ahead = shard_folder, read_ahead
        self._offloads = options.offloads(cpu_offload) or shard_folder is not None
        self.sharding_groups = sharding_groups
        self.on_neuron, self.device_id = on_neuron, options.device_of(device_id)
        self._debug_dummy_forward_pass = _debug_dummy_forward_pass
        self._debug_dummy_all_reduce_op = _debug_dummy_all_reduce_op
        self._debug_msg, self._debug_print = _debug_msg, _debug_print
        communicator, replicas = options.groups_of(
            process_group,
            device_mesh,
            sharding_groups,
            replica_groups,
            sharding_rank,
            sharding_world_size,
        )
        self.communicator: _C.Communicator = communicator
        self.replicas: _C.Communicator | None = replicas
        self._host_groups = communicator, replicas
        self.rank, self.world_size = communicator.rank, communicator.world_size
        block = options.block(block_size, on_neuron or shard_param_on_dim_0)
        self._sharding = layout.Sharding(
            self.communicator,
            self.rank,
            self.world_size,
            math.lcm(_shard_size_multiple, block),
            on_dim_0=on_neuron or shard_param_on_dim_0,
            pads=shard_param_on_dim_0,
            block=block,
        )
        init = param_init_fn or initial_values.initializer(module)
        if auto_wrap_policy is not None:
            alike = functools.partial(
                self._inner_like,
                param_init_fn=init,
                sync_module_states=sync_module_states,
            )
            options.wrap_children(
                module, auto_wrap_policy, auto_wrapper_callable or alike
            )
        sources = [self.replicas, self.communicator] if sync_module_states else []
        groups = [group for group in sources if group is not None]
        layout.keep_unpacked(module)
        options.check_parameters(module)
        initial_values.settle(module, init, groups, ShardedModule, self.device_id)
        torch_guards.install()
        self._return_memory = return_memory
        self._live_in(options.home_of(module, self.device_id))
        self.borrowed = self._borrow(module)
        plain = options.is_float32(module)
        if self.compute_dtype is None and plain:
            self.compute_dtype = torch.float32
        self.buffer_dtype = self.buffer_dtype or self.compute_dtype
        needless = plain and self.compute_dtype == torch.float32
        self._input_dtype = None if needless else self.compute_dtype
        self._wrap(module)
        poison = options.poison()
        self._flags = (
            watch_released or poison == "protect",
            poison == "nan" and not watch_released,
            _debug_dummy_all_gather_op,
            _debug_dummy_reduce_scatter_op,
        )
        del module
        self.sharded_params: list[Any] = [
            self._sharding.shard_of(
                group,
                self._offloads,
                self.home.plugin if shard_folder is None else None,
            )
            for group in self._groups
        ]
        self._move_shards()
        self._set_shards()
        if self.buffer_dtype is not None:
            cast_buffers(self, self.buffer_dtype)
        for name, param in self.named_parameters():
            assert hasattr(param, "_is_sharded"), (
                f"found unsharded parameter: {name} ; {param.size()}"
            )
        self._reset_lazy_init()
        hooked: Any = self  # this has no types in torch
        hooked.register_load_state_dict_pre_hook(layout.before_load)
        hooked.register_load_state_dict_post_hook(_after_load)
        if execute_sharding_on_init and not on_neuron:
            self.communicator.barrier()

    # ---- construction

    def _live_in(self, home: options.Home) -> None:
        """Set what depends on where the unit's memory is. Collective on a GPU."""
        self.home, on_gpu = home, home.plugin is not None
        forward, backward = self._prefetches
        self.forward_prefetch = on_gpu if forward is None else forward
        if backward == "AUTO":
            backward = "BACKWARD_PRE" if on_gpu else None
        self.backward_prefetch = backward
        self._returns_memory = self._return_memory and not on_gpu
        self._recycles = self._returns_memory and _recycles()
        communicator, replicas = self._host_groups
        self.communicator = home.group(communicator) or communicator
        self.replicas = home.group(replicas)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """What to(), cuda() and others call with a function of a tensor."""
        here, apply_to_each = self.home.device, cast(Any, super()._apply)
        if fn(torch.empty(0, device=here)).device != here:
            move(self, fn, recurse)
            return self
        if not self._offloads or self.home.plugin is None:
            apply_to_each(fn, recurse)
            return self
        on_host = {id(t) for p in self.sharded_params for t in (p, p.grad)}

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = fn(tensor)
            stays = id(tensor) in on_host and made.device != tensor.device
            return tensor if stays else made

        apply_to_each(apart, recurse)
        return self

    def _borrow(self, module: nn.Module) -> list[tuple[layout.Place, Any]]:
        """Rejects parameters that units outside of this one own."""
        for place, _ in layout.of_other_units(module):
            raise ValueError(
                f"{place.path} is a parameter of another unit, too: wrap the module "
                f"that is around both instead of this {type(module).__name__}"
            )
        return []

    def _wrap(self, module: nn.Module) -> None:
        """The wrapped module and its groups; flat ones are in front."""
        params = [p for p in module.parameters() if not hasattr(p, "_is_sharded")]
        alike = self.buffer_dtype == self.compute_dtype
        kept = set() if alike else layout.beside_statistics(module)
        kinds = [(True, dtype) for dtype in dict.fromkeys(p.dtype for p in params)]
        kinds += [(False, dtype) for _, dtype in kinds]
        flat = [
            [
                p
                for p in params
                if (p.requires_grad, p.dtype) == kind and (p in kept) == keeps
            ]
            for kind in (kinds if self.flatten_parameters else ())
            for keeps in (False, True)
        ]
        self._fsdp_wrapped_module = FlattenParamsWrapper(
            module, flat, auto_unflatten_state_dict=False, _flatten=False
        )
        groups = [
            layout.under(group, "_fsdp_wrapped_module")
            for group in self._fsdp_wrapped_module._groups
        ]
        if not self.flatten_parameters:
            groups += [layout.lone_group(e) for e in layout.entries_of(self, params)]
        for group in groups:
            group.keeps_dtype = group.entries[0].param in kept
            self._sharding.fit(group)
        self._groups = groups

    def _make_unit(self) -> Unit:
        watched, poisoned, lone_gather, lone_reduce = self._flags
        gathered = [group.gathered_as(self.compute_dtype) for group in self._groups]
        trained = {
            dtype
            for group, dtype in zip(self._groups, gathered, strict=True)
            if group.requires_grad
        }
        wide = self.fp32_reduce_scatter or len(trained) != 1
        reduce_dtype = torch.float32 if wide else trained.pop()
        unit = Unit(
            self.communicator,
            tuple(
                (
                    group.size,
                    group.requires_grad,
                    shard_files.dtype_name(group.dtype),
                    shard_files.dtype_name(dtype),
                )
                for group, dtype in zip(self._groups, gathered, strict=True)
            ),
            reduce_dtype=shard_files.dtype_name(reduce_dtype),
            watched=watched,
            poisoned=poisoned,
            lone_gather=lone_gather,
            lone_reduce=lone_reduce,
            replicate_group=self.replicas,
            gather_bits=self.gather_bits or 0,
            reduce_bits=self.reduce_bits or 0,
            error_feedback=self.error_feedback,
            plugin=self.home.plugin,
            offload=self._offloads and self.home.plugin is not None,
            secondary_shards=self.secondary_shards or 0,
            shard_file=self._shard_file,
            read_ahead=self.read_ahead,
        )
        unit.owner = weakref.ref(self)
        unit.return_memory = self._returns_memory and not self._recycles
        unit.forward_prefetch = bool(self.forward_prefetch)
        unit.backward_pre = self.backward_prefetch == "BACKWARD_PRE"
        unit.backward_post = self.backward_prefetch == "BACKWARD_POST"
        factor = options.predivide_factor(self.world_size)
        unit.divide_factors = (factor, self.world_size / factor)
        return unit

    def _move_shards(self) -> None:
        """To a new file, with a folder for one."""
        self._shard_file = layout.file_for(self._groups, self.shard_folder)
        layout.move_to_file(self.sharded_params, self._groups, self._shard_file)

    def _set_shards(self) -> None:
        """Register the shards; the parameters become views of the unit's memory."""
        self._unit = self._make_unit()
        for group, shard in zip(self._groups, self.sharded_params, strict=True):
            self.register_parameter(shard._name, shard)
            for entry in group.entries:
                assert not hasattr(entry.param, "_is_sharded")
                entry.param._sharded_param = shard
                entry.param._unit = weakref.ref(self._unit)
        self._unit.shards = self.sharded_params
        for hook in self.__dict__.get("_hooks", ()):  # of the unit before a move
            hook.remove()
        self._hooks = layout.replace_parameters(
            self._unit, self._groups, self.compute_dtype
        )
        if self.use_orig_params:
            layout.make(self)
        self._watched: tuple[Any, ...] = changes.watched(self)
        self._attributes: tuple[Any, ...] = changes.attributes(self)

    def _inner_like(self, module: nn.Module, **more: Any) -> ShardedModule:
        """A child that auto_wrap_policy chooses, with the options of this one."""
        options = {name: getattr(self, name) for name in _INHERITED}
        return type(self)(
            module,
            **options,
            **more,
            reshard_after_forward=self._orig_reshard_after_forward,
            cpu_offload=self._offloads,
            execute_sharding_on_init=False,
            shard_param_on_dim_0=self._sharding.pads,
            _shard_size_multiple=self._sharding.multiple,
            block_size=None if self._sharding.on_dim_0 else self._sharding.block,
            process_group=self.communicator
            if self.replicas is None
            else (self.communicator, self.replicas),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with memory of its own in the same groups, without gradients."""
        return deep_copy(self, memo)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a sharded module cannot be pickled: each rank has a part of it. Save "
            "state_dict(), or the whole full_state_dict()"
        )

    def _reset_lazy_init(self) -> None:
        """Let the next forward find the outermost unit again."""
        self._is_root: bool | None = None
        self._is_alike = False  # on all ranks, as a root: not yet compared
        self._unit.forget_root()
        self.reshard_after_forward = self._orig_reshard_after_forward

    # ---- attributes

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

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and shards.

        By the names before wrapping: views with use_orig_params, and whole parameters
        in summon_full_params().

        Args:
            prefix (str, default ''): In front of each name.
            recurse (bool, default True): Those of modules below, too.
            remove_duplicate (bool, default True): Each parameter once.
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        summoned = self.training_state is TrainingState.SUMMON_FULL_PARAMS
        plain = summoned or self.use_orig_params
        rename = shard_files.original_name if plain else str
        return ((rename(name), param) for name, param in found)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's shards by name.

        Args:
            *args, **kwargs: As torch.nn.Module.state_dict's.
        """
        with layout.shards_shown(self.units()):
            return super().state_dict(*args, **kwargs)

    @property
    def training_state(self) -> TrainingState:
        """Where the unit is in a step."""
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
        """The parameters are released after the forward pass."""
        return self._unit.reshard_after_forward

    @reshard_after_forward.setter
    def reshard_after_forward(self, value: bool) -> None:
        self._unit.reshard_after_forward = value

    @property
    def _require_backward_grad_sync(self) -> bool:
        return self._unit.require_sync

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before their sum over the ranks."""
        return self._unit.divide_factors[0]

    @property
    def gradient_postdivide_factor(self) -> float:
        """What gradients are divided by after their sum over the ranks."""
        return self._unit.divide_factors[1]

    def units(self) -> list[Any]:
        """Return the units below and this one, in the order of modules()."""
        return [m for m in self.modules() if isinstance(m, ShardedModule)]

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


def _after_load(module: Any, incompatible: object) -> None:
    """Gathered parameters are old now, and shards may have been replaced."""
    shards = [module._parameters[shard._name] for shard in module.sharded_params]
    for shard, group in zip(shards, module._groups, strict=True):
        module._sharding.mark(shard, group)
    layout.move_to_file(shards, module._groups, module._shard_file)
    module.sharded_params = module._unit.shards = shards
    if module.use_orig_params:
        layout.after_load(module)
    module._watched = changes.watched(module)
    module._unit.release()
