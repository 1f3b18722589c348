"""fairscale's FullyShardedDataParallel: its constructor and its full state_dict."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ctrainer.compat.fairscale import _local_state, _optim_state
from ctrainer.compat.fairscale._groups import communicator_of
from ctrainer.fsdp import FullyShardedDataParallel as Engine
from ctrainer.fsdp import TrainingState, full_params, layout
from ctrainer.fsdp.layout import cast_floats
from ctrainer.fsdp.shard_files import original_name, readable, with_keys
from ctrainer.runtime.torch_process import accelerator


def _owner_modules_of(borrowed: list[tuple[layout.Place, Any]]) -> list[Any]:
    """The engines of the units that parameters are borrowed from.

    Raises RuntimeError where there is none, as in a copy of the borrower alone.
    """
    found: list[Any] = []
    for place, param in borrowed:
        owner = getattr(param, "_unit", lambda: None)()
        if owner is None:
            raise RuntimeError(
                f"{place.path} is borrowed from a unit that is not there, as in a copy "
                "of this one alone: copy a module around both"
            )
        if owner not in found:
            found.append(owner)
    return found


class FullyShardedDataParallel(Engine):
    """ctrainer.fsdp.FullyShardedDataParallel under fairscale's arguments and habits.

    state_dict() and load_state_dict() are those of the unwrapped module, collective;
    local_state_dict() and load_local_state_dict() are this rank's shards. A parameter
    that a unit beside this one has taken over is borrowed from it: both are in one
    root, and each gathers it for its own forward and backward pass.

    Args:
        module (nn.Module): The module.
        process_group (default None): A Communicator, a group of torch.distributed, or
            None for all ranks.
        process_group_reduce_scatter (default None): No effect.
        reshard_after_forward (bool, default True): Release the parameters after the
            forward pass.
        disable_reshard_on_root (bool, default True): The outermost unit keeps them
            until the backward pass.
        mixed_precision (bool, default False): Compute in compute_dtype.
        fp32_reduce_scatter (bool, default False): Reduce gradients in float32.
        flatten_parameters (bool, default True): Have a flat parameter of what is
            trained and one of what is frozen.
        move_params_to_cpu (bool, default False): The shards and gradients of a module
            on a GPU are in host memory.
        compute_dtype (torch.dtype | None, default None): With mixed_precision; None:
            float16.
        buffer_dtype (torch.dtype | None, default None): Of buffers; None:
            compute_dtype.
        move_grads_to_cpu (bool | None, default None): No effect: gradients are where
            the shards are.
        bucket_cap_mb (int, default 25): No effect.
        compute_device (torch.device | None, default None): The GPU to which a module in
            host memory is moved; another than the module's is rejected. None: with
            move_params_to_cpu the current one, where there is one; without, the module
            stays until .cuda() is called.
        no_broadcast_optim_state (bool | None, default False): No effect.
        state_dict_device (torch.device | None, default None): Where the module is;
            another kind of device is rejected.
        clear_autocast_cache (bool, default False): No effect.
        force_input_to_fp32 (bool, default False): A unit of float32 casts its floating
            point inputs.
        verbose (bool, default False): No effect.
        cpu_offload (bool, default False): The old name of move_params_to_cpu.
        state_dict_on_rank_0_only (bool, default False): state_dict() is empty on other
            ranks.
        gradient_predivide_factor (float | None, default None): What gradients are
            divided by before their sum.
        allow_reset_parameters (bool, default False): reset_parameters() calls the
            module's, with the parameters gathered.
        gather_bits, reduce_bits (int | None, default None): As
            ctrainer.fsdp.FullyShardedDataParallel's.

    Raises:
        ValueError: fp32_reduce_scatter without mixed_precision, another device, a
            parameter of a unit below; else what the engine raises.

    Source: fairscale 0.4.13, fairscale/nn/data_parallel.

    Example:
        >>> import torch
        >>> from ctrainer.compat.fairscale import FullyShardedDataParallel
        >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 2))
        >>> sorted(model.state_dict())
        ['bias', 'weight']
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
        *,
        gather_bits: int | None = None,
        reduce_bits: int | None = None,
    ) -> None:
        offloads = move_params_to_cpu or cpu_offload
        _check(mixed_precision, fp32_reduce_scatter)
        half = torch.float16 if mixed_precision else torch.float32
        super().__init__(
            module,
            reshard_after_forward,
            flatten_parameters,
            execute_sharding_on_init=False,
            disable_reshard_on_root=disable_reshard_on_root,
            compute_dtype=compute_dtype or half,
            buffer_dtype=buffer_dtype,
            fp32_reduce_scatter=fp32_reduce_scatter,
            on_neuron=False,
            _shard_size_multiple=1,
            process_group=communicator_of(process_group),
            gather_bits=gather_bits,
            reduce_bits=reduce_bits,
            cpu_offload=offloads,
            device_id=_place(compute_device, offloads),
        )
        _check_devices(self.home.device, compute_device, state_dict_device)
        self.process_group = process_group
        self.process_group_reduce_scatter = (
            process_group_reduce_scatter or process_group
        )
        self.allow_reset_parameters = allow_reset_parameters
        self.mixed_precision = mixed_precision
        self.move_params_to_cpu = offloads
        self.force_input_to_fp32 = force_input_to_fp32
        self.state_dict_on_rank_0_only = state_dict_on_rank_0_only
        # The optimizer's state is put together by the unit's own group in any case.
        self.no_broadcast_optim_state = bool(no_broadcast_optim_state)
        self._locally = False
        if gradient_predivide_factor is not None:
            after = self.world_size / gradient_predivide_factor
            self.set_gradient_divide_factors(gradient_predivide_factor, after, False)

    # ---- parameters of units beside this one

    def _borrow(self, module: nn.Module) -> list[tuple[layout.Place, Any]]:
        found = layout.of_other_units(module)
        below = {id(m._unit) for m in module.modules() if isinstance(m, Engine)}
        for place, param in found:
            if id(param._unit()) in below:
                raise ValueError(
                    f"{place.path} is a parameter of a unit below, too: wrap both in "
                    "one unit"
                )
            layout.hide(place, param)
        # None in a copy, whose owners may be made after it.
        self._owner_modules: list[Any] | None = _owner_modules_of(found)
        return found

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Declare that a parameter of this module is that of a unit beside it, which
        the constructor has seen.

        Args:
            p (nn.Parameter): Its shard, or the other module's parameter.

        Raises:
            AssertionError: the unit has been called, is flat or has no parameter of its
                own, or p is not here.
        """
        assert self._is_root is None, "call append_shared_param before the forward"
        assert not self.flatten_parameters, "it needs flatten_parameters=False"
        assert self.sharded_params, "Must have at least 1 non-shared param."
        shards = [param._sharded_param for _, param in self.borrowed]
        own = getattr(p, "_sharded_param", p)
        assert any(own is shard for shard in shards), (
            "p is no parameter that this module shares with a unit wrapped before"
        )

    @property
    def params(self) -> list[nn.Parameter]:
        """The shards that are this unit's own."""
        return list(self.sharded_params)

    def non_shared_params(self) -> list[nn.Parameter]:
        """Return the shards that are this unit's own."""
        return list(self.sharded_params)

    def reset_parameters(self) -> None:
        """Call the module's, on gathered parameters: the same on all ranks if their
        generators are. Collective.

        Raises RuntimeError without allow_reset_parameters.
        """
        if not self.allow_reset_parameters:
            raise RuntimeError(
                "reset parameters after FSDP wrapping is not allowed: construct with "
                "allow_reset_parameters=True"
            )
        if self.training_state is TrainingState.SUMMON_FULL_PARAMS:
            self.module.reset_parameters()
            return
        with self.summon_full_params():
            self.module.reset_parameters()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield fairscale's names and shards.

        The names are those of the parameters before wrapping, or flat_param_0 and so
        on, and have the wrappers in them with flatten_parameters; in
        summon_full_params() whole parameters.

        Args:
            prefix (str, default ''): In front of each name.
            recurse (bool, default True): Those of modules below, too.
            remove_duplicate (bool, default True): Each parameter once.
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        if self.__dict__.get("_locally", True):
            return found
        flat = self.flatten_parameters
        return ((_name_before(name, param, flat), param) for name, param in found)

    # ---- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters, run the module, release them, and return its output.

        Args:
            *args, **kwargs: Of the module's forward.

        Raises:
            RuntimeError: the unit shares a parameter with another one and is the root.
        """
        if self._owner_modules is None:
            self._owner_modules = _owner_modules_of(self.borrowed)
        owners = self._owner_modules
        if owners:
            self._lazy_init()
            if self._is_root:
                raise RuntimeError(
                    "a unit that shares a parameter with another one has to be called "
                    "inside of a unit around both"
                )
        run = self._forward
        for owner in owners:
            run = functools.partial(_run_in, owner, run)
        return run(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.force_input_to_fp32 and self.compute_dtype == torch.float32:
            args, kwargs = cast_floats(torch.float32, (args, kwargs))
        return super().forward(*args, **kwargs)

    @property
    def cpu_offload(self) -> bool:
        """The shards are in host memory."""
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
        return the norm before. Collective.

        Args:
            max_norm (float): The largest norm.
            norm_type (float | str, default 2.0): p > 0, or inf, also as a string.
            filter_params_fn (Callable[[Any], Any] | None, default None): Chooses of
                this rank's parameters those that count, and are scaled.
        """
        if filter_params_fn is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        chosen = list(filter_params_fn(self.params_with_grad))
        return self._clip(chosen, max_norm, norm_type, alone=False)

    @contextlib.contextmanager
    def summon_full_params(
        self, recurse: bool = True, volatile: bool = False
    ) -> Iterator[None]:
        """Gather all parameters within the block. Collective.

        Args:
            recurse (bool, default True): Those of inner units too.
            volatile (bool, default False): Drop changes at the end.

        Yields:
            None.
        """
        with super().summon_full_params(recurse, writeback=not volatile):
            yield

    # ---- the model's state

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        """Return the unwrapped module's state_dict. Collective.

        Args:
            *args, **kwargs: As torch.nn.Module.state_dict's.
            destination (default None): A dict to fill; None: a new one.
            prefix (str, default ''): In front of each name.
        """
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
        """Take this rank's shards out of the unwrapped module's state_dict; return
        missing and unexpected keys.

        Args:
            state_dict (dict[str, Any]): Full tensors by name.
            strict (bool, default True): Reject missing and unexpected keys.

        Raises:
            RuntimeError: keys that are missing or unknown (strict), or parameters of
                other shapes; nothing is loaded then.
        """
        own = set(full_params.empty_state(self))
        self.load_full_state_dict(state_dict, strict)
        return _IncompatibleKeys(
            sorted(own - set(state_dict)), sorted(set(state_dict) - own)
        )

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return this rank's shards, by the names before wrapping, or flat_param_0 and
        so on under the unit's.

        Args:
            *args, **kwargs: As torch.nn.Module.state_dict's.

        Raises:
            ValueError: in summon_full_params().
        """
        self._assert_idle()
        with _as_local(self):
            state = FullyShardedDataParallel.state_dict(self, *args, **kwargs)
        for key in list(state):
            state[readable(key)] = state.pop(key)
        return state

    def load_local_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True
    ) -> _IncompatibleKeys:
        """Load what local_state_dict() returned on this rank; return missing and
        unexpected keys.

        Args:
            state_dict (dict[str, Any]): Shards by name, fairscale's or the engine's.
            strict (bool, default True): Reject missing and unexpected keys.
        """
        with _as_local(self):
            own = FullyShardedDataParallel.state_dict(self)
        loaded: _IncompatibleKeys = super().load_state_dict(
            with_keys(state_dict, own), strict
        )
        return loaded

    def local_metadata_dict(self) -> dict[str, Any]:
        """Return what consolidate_shard_weights() needs, as fairscale has it.

        param_metadata: for each unit its path, for each of its shards the names, shapes
        and numbers of elements of the parameters in it and this rank's padding, and the
        further names of tied parameters; buffer_names.
        """
        return _local_state.metadata(self, FullyShardedDataParallel)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: list[dict[str, torch.Tensor]],
        shard_metadata: list[dict[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Return the unwrapped module's state_dict.

        Args:
            shard_weights (list[dict[str, torch.Tensor]]): local_state_dict() of every
                rank, by rank; fairscale's own, too.
            shard_metadata (list[dict[str, Any]]): local_metadata_dict() of every rank,
                in the same order.
            with_module_buffers (bool, default True): Keep buffers.
            strict (bool, default True): False leaves out parameters and buffers that
                the weights do not have.

        Raises:
            ValueError: other numbers of weights and metadata, or they do not fit.
        """
        return _local_state.consolidated(
            shard_weights, shard_metadata, with_module_buffers, strict
        )

    # ---- the optimizer's state

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """Return the engine's, by names that `ctrainer consolidate` knows.

        Args:
            model (nn.Module): A unit, or a module around units.
            optim (torch.optim.Optimizer): Made of model.parameters().
            group (default None): No effect.
        """
        with _as_local(model):
            return Engine.sharded_optim_state_dict(model, optim, group)

    def gather_full_optim_state_dict(
        self, optim: torch.optim.Optimizer, **ignored: Any
    ) -> dict[str, Any] | None:
        """Return the state of whole parameters, on rank 0; None elsewhere. Collective.

        state: by number of parameter, units in the order of modules() and each one's
        parameters in order; param_groups: by these numbers; param_id_map: number ->
        that of the shard; uncollected_local_ids: [].

        Args:
            optim (torch.optim.Optimizer): Made of this module's parameters.
            **ignored: No effect.

        Raises:
            ValueError: a state that has not the shape of its shard and differs between
                ranks, or parameters that are not this module's.
        """
        return _optim_state.gather(self, optim)

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's part of a full state, for load_state_dict of the
        optimizer.

        Args:
            full_optim_state_dict (dict[str, Any]): What gather_full_optim_state_dict
                returned, on any number of ranks; it is not changed.

        Raises:
            AssertionError: the units are others.
        """
        return _optim_state.shard(self, full_optim_state_dict)


@contextlib.contextmanager
def _as_local(model: nn.Module) -> Iterator[None]:
    """Within it state_dict() and the names of parameters are those of shards."""
    units = get_fsdp_instances(model)
    for unit in units:
        unit._locally = True
    try:
        yield
    finally:
        for unit in units:
            unit._locally = False


def _name_before(name: str, param: Any, flat: bool) -> str:
    """In a flat unit with the wrappers, as fairscale's."""
    if not hasattr(param, "_orig_name"):
        return name
    own = name.removesuffix(param._name) + param._orig_name
    return own if flat else original_name(own)


def _run_in(unit: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """run, with a unit's parameters gathered in forward and backward."""
    return unit.forward(run, args, kwargs, (), ())


def _check(mixed_precision: bool, fp32_reduce_scatter: bool) -> None:
    if fp32_reduce_scatter and not mixed_precision:
        raise ValueError("fp32_reduce_scatter requires mixed_precision=True")


def _place(compute_device: Any, offloads: bool) -> torch.device | None:
    """To where a module in host memory is moved; others wait for .cuda()."""
    if compute_device is None:
        return accelerator() if offloads else None
    device = torch.device(compute_device)
    return None if device.type == "cpu" else device


def _check_devices(home: torch.device, *devices: torch.device | None) -> None:
    for device in devices:
        if device is not None and torch.device(device).type != home.type:
            raise ValueError(
                f"compute_device and state_dict_device must be {home.type}, where the "
                f"module is, not {device}: move the module there first"
            )


def get_fsdp_instances(
    mod: nn.Module, skip_empty: bool = False
) -> list[FullyShardedDataParallel]:
    """Return the units among the modules of a module.

    Args:
        mod (nn.Module): The module.
        skip_empty (bool, default False): Only those with parameters.
    """
    units = [m for m in mod.modules() if isinstance(m, FullyShardedDataParallel)]
    return [unit for unit in units if unit.sharded_params or not skip_empty]
