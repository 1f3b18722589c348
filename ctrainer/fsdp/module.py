"""FullyShardedDataParallel: a module whose parameters are sharded over ranks."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import full_params, optim_state, shard_files, shard_metadata
from ctrainer.fsdp.layout import cast_floats
from ctrainer.fsdp.sharded import ShardedModule, TrainingState, residual_of

__all__ = ["FullyShardedDataParallel", "XlaFullyShardedDataParallel"]


class FullyShardedDataParallel(ShardedModule):
    """A module of whose parameters each rank keeps a shard.

    They are gathered for the forward and the backward pass and released after each; the
    gradients are averaged, and each rank keeps those of its shards, on which any
    optimizer works. The optimizer is made after wrapping: parameters() yields the
    shards, of the parameters' dtypes. Wrap inner modules first and then those around
    them: a unit shards what is below it and not sharded yet. All ranks build and call
    the same.

    Args:
        module (nn.Module): On the CPU, the current CUDA device or the meta device, its
            parameters of float32, bfloat16 and float16, also mixed, frozen ones of
            integers, too, and without sync_module_states the same on every rank. On a
            GPU the ranks of the group come together over NCCL, by the plugin
            ctrainer._cuda.
        reshard_after_forward (bool, default True): Release the parameters after the
            forward pass and gather them again for the backward pass.
        flatten_parameters (bool, default False): Shard the trainable parameters of a
            dtype as one flat parameter and the frozen ones as another, rather than each
            by itself.
        execute_sharding_on_init (bool, default True): Wait for the other ranks, without
            on_neuron; the full parameters are gone in any case.
        optimization_barrier_in_forward, optimization_barrier_in_backward (bool, default
            True): No effect: for a compiler.
        mark_step_on_finalization (bool, default False): No effect: for a compiler.
        disable_reshard_on_root (bool, default True): The outermost unit keeps its
            parameters from the forward to the backward pass.
        compute_dtype (torch.dtype | str | None, default None): Of parameters and inputs
            in the passes: float32, float16 or bfloat16, also by name; None: of each
            parameter its own, as integers always have. Inputs are not cast then.
        buffer_dtype (torch.dtype | str | None, default None): Of buffers; None:
            compute_dtype, float32 in a module of float32, and else their own. Where
            it is not compute_dtype, layers with running statistics, such as BatchNorm,
            compute in the dtype of their parameters.
        fp32_reduce_scatter (bool, default False): Reduce gradients in float32 whatever
            compute_dtype, as those of a unit of several dtypes always are.
        sharding_groups (lists of ranks | Communicator | None, default None): The
            sharding groups, of which one has this rank.
        sharding_rank (int | None, default None): This rank's place in its list of
            sharding_groups, with which it is given.
        sharding_world_size (int | None, default None): The length of that list.
        on_neuron (bool, default True): Shard each parameter by its rows, which the
            ranks have to divide; False: as shard_param_on_dim_0 says.
        _shard_size_multiple (int, default 128): Flattened parameters are padded to a
            multiple of so many elements a rank.
        _pin_layout_in_all_reduce, _pin_layout_in_all_gather,
            _pin_layout_in_reduce_scatter (bool, default False): No effect: for a TPU.
        _debug_dummy_forward_pass (bool, default False): Replace the forward pass by a
            sum of means of inputs and parameters.
        _debug_msg (str, default 'xla_fsdp'): Printed with _debug_print, and with an
            error in the backward pass.
        _debug_print (bool, default False): Let the first rank print the number of
            parameters of the root.
        _debug_dummy_all_gather_op, _debug_dummy_all_reduce_op,
            _debug_dummy_reduce_scatter_op (bool, default False): Leave the other ranks
            out of the collective.
        _debug_dummy_optimization_barrier_op (bool, default False): No effect: for a
            compiler.
        sync_on_finalization (bool, default False): No effect: for a compiler.
        shard_param_on_dim_0 (bool, default False): Without on_neuron: shard each
            parameter by its rows, padded; False: flattened and padded to
            _shard_size_multiple.
        pin_layout_in_collective_ops (bool, default True): No effect: for a TPU.
        reduce_scatter_bucket_size_mb (int, default 0): No effect: for a TPU.
        coalesce_all_gather_ops (bool, default False): No effect: for a TPU.
        auto_wrap_policy (Callable | None, default None): Called with each module below,
            the inner ones first, as (module, recurse, nonwrapped_numel); those for
            which it returns True become units with these options.
        auto_wrapper_callable (Callable | None, default None): Makes a unit of a module
            that auto_wrap_policy chose; None: this class.
        param_init_fn (Callable | None, default None): Called with each module that has
            parameters or buffers of its own on the meta device, to give it values on
            the CPU; None: _init_weights(module) of a module around, as transformers'
            models have, or the module's reset_parameters().
        sync_module_states (bool, default False): Let all ranks begin with the first
            one's values, of which each has a unit's at a time; only that rank needs
            values, and on others modules may be on meta.
        _use_xla_patched_linear (bool, default True): No effect: for a TPU.
        process_group (Communicator | ProcessGroup | tuple | None, default None): The
            sharding group; for hybrid sharding a tuple of the sharding and the
            replicate group, whose ranks have the same shards and average their
            gradients (hybrid_groups makes it). None: ctrainer.comm.world().
        device_mesh (DeviceMesh | None, default None): torch's, in place of
            process_group: of one dimension, or of two: replicas and shards.
        replica_groups (lists of ranks | Communicator | None, default None): The
            replicate groups, beside sharding_groups.
        use_orig_params (bool, default False): Let parameters() yield, in place of
            shards, a view of the shard for every parameter by its own name, for groups
            with options of their own.
        gather_bits (int | None, default None): 8 or 4: all-gather parameters quantized,
            with a scale for 256 of them: 26 or 14 % of float32's bytes. None: not
            quantized.
        reduce_bits (int | None, default None): 8 or 4: reduce-scatter gradients
            quantized, likewise.
        error_feedback (bool, default True): With reduce_bits: add the rounding error of
            a gradient to the next one, which takes a float32 for every trainable
            element of the whole module on each rank.
        forward_prefetch (bool | None, default None): While a unit's forward pass
            computes, gather the parameters of the unit that came next in the last one.
            One unit more is gathered at most. None: on a GPU, where a gather that is
            not prefetched runs beside no computation. No effect with gather_bits.
        backward_prefetch (BackwardPrefetch | str | None, default "AUTO"): Gather the
            next unit of the backward pass from before a unit's own begins
            ("BACKWARD_PRE") or after its end, with less memory ("BACKWARD_POST"). None:
            when it is needed. "AUTO": BACKWARD_PRE on a GPU, None on the CPU. No effect
            with gather_bits.
        cpu_offload (bool | CPUOffload | None, default False): Keep the shards and
            gradients of a module on a GPU in host memory, where any optimizer, such as
            those of ctrainer.optim, updates them; each gather and reduction passes a
            shard on. No effect on the CPU.
        watch_released (bool, default False): End the process where a parameter is used
            that is not gathered, rather than reading zeros.
        return_memory (bool, default True): Let freed blocks of torch in host memory
            make room for units and for longer blocks, in the whole process; else what
            the activations of one step leave behind stays malloc's, and sharding saves
            little on the CPU.
        secondary_shards (int | None, default None): The ranks of each machine, which
            keep a unit's parameters in so many shards from its forward to the end of
            the backward pass, in compute_dtype: the backward pass gathers within
            machines alone. None: not kept.
        shard_folder (str | os.PathLike | None, default None): Keep this rank's shards
            in a file without a name in that folder, as on an NVMe drive; cpu_offload is
            on then. A gather reads them, and optimizers of ctrainer.optim that work
            element by element update them piece by piece, with the same results to the
            bit. None: in memory.
        read_ahead (int, default 5): With shard_folder: of how many units shards are
            read into memory at once at most, in the order of the last pass, >= 1.
        device_id (torch.device | int | str | None, default None): The current GPU, to
            which the unit's parameters and buffers are moved from the CPU or the meta
            device before they are sharded; the CPU: those of the meta device stay
            there. None: they stay where they are, but with sync_module_states go to the
            GPU where the first rank's are on one.
        block_size (int | None, default None): Let ranks cut every parameter, also
            within a flat one, at multiples of so many of its elements: 256 is that of
            8-bit optimizer state, which then is that of the whole parameter. Takes
            fewer zeros than block_size behind each parameter. None: cut anywhere.

    Raises:
        OSError: the folder of shard_folder is missing, or has too little room; later,
            the drive fails.
        RuntimeError: a module that is wrapped already or has no forward; on a GPU, a
            part of the plugin that is missing.
        ValueError: dtypes, bits, prefetches or groups that make no sense; another
            number of secondary_shards than a machine has ranks; text for a
            truth value; parameters on two devices, or on another one than device_id;
            rows that the ranks do not divide.
        TypeError: no module; parameters of other dtypes, or of several tensors; a
            policy that cannot be called so; another keyword.

    Source: torch_xla's XlaFullyShardedDataParallel, whose names, files and states it
    has; Rajbhandari et al., "ZeRO", 2020.

    Example:
        >>> import torch
        >>> from ctrainer.fsdp import FullyShardedDataParallel
        >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> norm = model.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> model.full_state_dict()["weight"].shape
        torch.Size([2, 4])
    """

    # ---- roots

    def _lazy_init(self) -> None:
        """The first unit that is called is the root of all units below, also of units
        that have been called alone before."""
        if self._is_root is not None:
            return
        self._is_root = True
        self.assert_state(TrainingState.IDLE)
        for unit in self.units():
            if unit is not self:
                if unit._is_root:
                    unit._reset_lazy_init()
                unit._is_root = False
        for name, unit in self.named_modules():
            if isinstance(unit, ShardedModule):
                unit._unit.path = shard_files.original_name(f"{name}.").rstrip(".")
                unit._unit.label = unit._unit.path or "the root"
        self._unit.set_units([unit._unit for unit in self.units()])
        if self._returns_memory:  # what loading and sharding the module left behind
            _C.malloc_trim()
        if self.disable_reshard_on_root:
            self.reshard_after_forward = False
        if self._debug_print and self.rank == 0:
            print(
                f"root FSDP got {len(list(self.parameters()))} total params "
                f"(_debug_msg: {self._debug_msg}).",
                flush=True,
            )

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Check that the unit is in one of the states.

        Args:
            state (TrainingState | Sequence[TrainingState]): The state, or several that
                will do.

        Raises:
            ValueError: the unit is in another state; the first rank prints where.
        """
        states = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state in states:
            return
        message = (
            f"expected to be in states {states} but current state is "
            f"{self.training_state}"
        )
        if self.training_state is TrainingState.IDLE:
            message += (
                ": a backward comes through tensors that a forward has returned, alone "
                "or in tuples, lists, sets, mappings and dataclasses, not in objects "
                "of other classes"
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
        """Gather the parameters, run the module, release them, and return its output.

        Args:
            *args, **kwargs: Of the module's forward; floating point tensors are cast to
                compute_dtype, if it is given.
        """
        if self._unit.state == TrainingState.SUMMON_FULL_PARAMS.value:
            return self.module(*args, **kwargs)
        self._lazy_init()
        if self._is_root and not self._is_alike:
            shard_metadata.compare(self, self.units())
            self._is_alike = True
        if self._input_dtype is not None:
            args, kwargs = cast_floats(self._input_dtype, (args, kwargs))
        run = self._dummy_forward if self._debug_dummy_forward_pass else self.module
        return self._unit.forward(run, args, kwargs, self._watched, self._attributes)

    def _dummy_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sum of the means of all inputs and parameters, of inner units too."""
        recursive = kwargs.pop("_xla_fsdp_dummy_forward_resursive", True)
        out = torch.zeros(1, device=self.home.device)
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
        """Keep gradients on their rank within the block, full-size and in float32.

        Yields:
            None; the first backward pass outside reduces the sum.

        Raises:
            AssertionError: this is an inner unit.
            ValueError: in the middle of a forward or backward pass.
        """
        self._lazy_init()
        assert self._is_root, "no_sync on inner FSDP is not supported"
        self._assert_idle()
        before = [(unit, unit._unit.require_sync) for unit in self.units()]
        for unit, _ in before:
            unit._unit.require_sync = False
        try:
            yield
        finally:
            for unit, required in before:
                unit._unit.require_sync = required  # of another one after a move

    def set_gradient_divide_factors(
        self, pre: float, post: float, recursive: bool
    ) -> None:
        """Divide gradients by `pre` before their sum over the ranks and by `post`
        after.

        Args:
            pre, post (float): By default their product is the number of ranks.
            recursive (bool): Set them for inner units too.

        Raises:
            ValueError: in the middle of a forward or backward pass.
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

        Collective.

        Args:
            max_norm (float): The largest norm, >= 0.
            norm_type (float | str, default 2.0): p > 0, or inf, also as a string.
            groups (default None): The unit's sharding_groups, or None.

        Returns:
            The norm before clipping, a float32 tensor of no dimension.

        Raises:
            AssertionError: this is not the root of a forward pass.
            ValueError: other groups.
        """
        if groups is not None and groups != self.sharding_groups:
            raise ValueError(
                "groups must be the sharding_groups of the unit or None: its shards "
                "lie on these ranks"
            )
        alone = self._debug_dummy_all_reduce_op
        return self._clip(self.params_with_grad, max_norm, norm_type, alone)

    def _clip(
        self, params: list[Any], max_norm: float, norm_type: float | str, alone: bool
    ) -> torch.Tensor:
        assert self._is_root, (
            "clip_grad_norm should only be called on the root (parent) instance"
        )
        self._assert_idle()
        total = self._unit.clip(params, float(max_norm), float(norm_type), alone)
        return torch.full((), total, dtype=torch.float32, device=self.home.device)

    # ---- the full parameters

    @contextlib.contextmanager
    def summon_full_params(
        self, recurse: bool = True, writeback: bool = True
    ) -> Iterator[None]:
        """Gather all parameters within the block.

        named_parameters() yields them, in the shards' dtypes, rather than the shards.
        Units that are called run with these, on any rank, and gather nothing.
        Collective.

        Args:
            recurse (bool, default True): Those of inner units too.
            writeback (bool, default True): Put changes, alike on all ranks, into the
                shards at the end.

        Yields:
            None.

        Raises:
            RuntimeError: a parameter was replaced by another.
        """
        self._assert_idle()
        with full_params.summoned(self.units() if recurse else [self], writeback):
            yield

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Call fn with every module below and this one, the parameters gathered; return
        this module.

        Changes, alike on all ranks, go into the shards. Units gather one at a time,
        those around others meanwhile. Collective.

        Args:
            fn (Callable[[nn.Module], Any]): Called with a module; its result is
                dropped.
        """
        if self.training_state is TrainingState.SUMMON_FULL_PARAMS:
            return super().apply(fn)
        with self.summon_full_params(recurse=False):
            return super().apply(fn)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the unwrapped module's state_dict().

        Collective; also in summon_full_params(), whose changes it has.
        """
        self._unit.recover()
        self.assert_state([TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS])
        return full_params.state_dict(self)

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Take every rank's shards out of the unwrapped module's state_dict().

        Args:
            state (dict[str, Any]): Full tensors by the names before wrapping.
            strict (bool, default True): Reject missing and unknown keys.

        Raises:
            RuntimeError: keys that are missing or unknown (strict), or parameters of
                other shapes; nothing is loaded then.
        """
        self._assert_idle()
        full_params.load_state_dict(self, self.units(), state, strict)

    # ---- optimizer states, under torch's names

    full_optim_state_dict = staticmethod(optim_state.full_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_state.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(
        optim_state.scatter_full_optim_state_dict
    )
    sharded_optim_state_dict = staticmethod(optim_state.sharded_optim_state_dict)
    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state.optim_state_dict_to_load)
    rekey_optim_state_dict = staticmethod(optim_state.rekey_optim_state_dict)

    def _residuals(self) -> dict[str, torch.Tensor]:
        """By the name of the unit, over its own memory."""
        found = {}
        for name, unit in self.named_modules():
            residual = residual_of(unit._unit) if unit in self.units() else None
            if residual is not None:
                found[name] = residual
        return found

    def feedback_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the error-feedback residuals of gradients on this rank, float32, by
        unit.

        Empty without reduce_bits and error_feedback.
        """
        return {name: residual.clone() for name, residual in self._residuals().items()}

    def load_feedback_state_dict(self, state: dict[str, Any]) -> None:
        """Load what feedback_state_dict() returned on this rank.

        Args:
            state (dict[str, Any]): Residuals by unit.

        Raises:
            ValueError: it is of other units or another number of ranks.
        """
        residuals = self._residuals()
        expected = {name: r.numel() for name, r in residuals.items()}
        given = {name: value.numel() for name, value in state.items()}
        if given != expected:
            raise ValueError(
                f"error feedback is of units with {given} elements; expected "
                f"{expected}, of as many ranks: with others leave it out, and begin "
                "without residuals"
            )
        for name, residual in residuals.items():
            residual.copy_(state[name])

    # ---- names and metadata

    def get_original_names_and_sharded_parameters(
        self,
    ) -> list[tuple[str, nn.Parameter]]:
        """Return the names, as before wrapping, and the shards, like
        named_parameters()."""
        if self.use_orig_params:
            return list(self.named_parameters())
        return [
            (
                shard_files.original_name(shard_files.join(name, shard._orig_name)),
                shard,
            )
            for name, unit in self.named_modules()
            if isinstance(unit, FullyShardedDataParallel)
            for shard in unit.sharded_params
        ]

    def get_shard_metadata(self) -> dict[str, Any]:
        """Return what consolidate_sharded_model_checkpoints needs beside the shards.

        shard_info: by unit, for each shard the size and the name of what it is part of;
        flatten_info: for each flat parameter (names, shapes, numels); buffer_info: the
        dtypes that buffers had; shared_info: the other names of tied parameters;
        world_size and rank; shard_param_on_dim_0, shard_size_multiple and block_size:
        how parameters are divided.
        """
        return shard_metadata.shard_metadata(self, FullyShardedDataParallel)


XlaFullyShardedDataParallel = FullyShardedDataParallel
