"""FullyShardedDataParallel: a module whose parameters are sharded over ranks."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn

from ctrainer.fsdp import full_params, optim_state, shard_metadata
from ctrainer.fsdp.layout import cast_floats, tensor_over
from ctrainer.fsdp.sharded import ShardedModule, TrainingState

# What the codes of gradients have missed so far, of all units: saved and loaded.


def _residuals(root: Any) -> dict[str, torch.Tensor]:
    """By the name of the unit, over its own memory."""
    found = {}
    for name, unit in root.named_modules():
        memory = getattr(getattr(unit, "_unit", None), "residual", None)
        if memory is not None and unit in root.units():
            size = torch.Size([memory.nbytes // torch.float32.itemsize])
            found[name] = tensor_over(memory, torch.float32, 0, size)
    return found


def state_dict(root: Any) -> dict[str, torch.Tensor]:
    return {name: residual.clone() for name, residual in _residuals(root).items()}


def load_state_dict(root: Any, state: dict[str, Any]) -> None:
    residuals = _residuals(root)
    expected = {name: r.numel() for name, r in residuals.items()}
    given = {name: value.numel() for name, value in state.items()}
    if given != expected:
        raise ValueError(
            f"error feedback is of units with {given} elements; expected {expected}, "
            "of as many ranks: with others leave it out, and begin with none"
        )
    for name, residual in residuals.items():
        residual.copy_(state[name])


__all__ = ["FullyShardedDataParallel", "XlaFullyShardedDataParallel"]


class FullyShardedDataParallel(ShardedModule):
    """A module of whose parameters each rank keeps a part.

    They are gathered for the forward and the backward and released after each; the
    gradients are averaged, and each rank keeps those of its part, on which any
    optimizer works. It is made after wrapping: parameters() yields the shards, of
    float32. Wrap inner modules first and then those around them: a unit shards what
    is below it and not sharded yet. All ranks build and call the same.

    module: on the CPU or the current CUDA device, its parameters float32 and the same
    on every rank. On a GPU the ranks of the group come together over NCCL, by the
    plugin ctrainer._cuda.
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
    or a group of torch.distributed; by default ctrainer.comm.world(). Hybrid sharding:
    a tuple of two, who shares and the replicas, which have the same shards and
    average their gradients (hybrid_groups makes them); or device_mesh, torch's, with
    dimensions for replicas and shards; or replica_groups, lists of ranks, beside
    sharding_groups.

    use_orig_params: parameters() has, in place of shards, a view of the shard for every
    parameter by its own name, for groups with options of their own.

    gather_bits, reduce_bits, 8 or 4: parameters, gradients travel quantized, a scale
    for 256 of them, in 26 or 14 % of float32's bytes. error_feedback: what is lost of a
    gradient is added to the next one; that takes a float32 for every trainable element
    of the whole module on each rank.

    forward_prefetch: while a unit's forward computes, the parameters of the one that
    came next in the last forward are on their way. backward_prefetch: in the backward,
    from before a unit's own begins ("BACKWARD_PRE") or after its end, with less memory
    ("BACKWARD_POST"); torch's BackwardPrefetch or a word. One unit more is gathered at
    most. Nothing with gather_bits.

    cpu_offload: True, or torch's CPUOffload(offload_params=True): of a module on a GPU
    the shards and their gradients are in host memory, where any optimizer, such as
    those of ctrainer.optim, updates them; each gather and reduction passes a shard on.
    On the CPU there is nothing to do.

    auto_wrap_policy: called with each module below (module, recurse, nonwrapped_numel),
    the inner ones first; where it says so they become units with these options, or what
    auto_wrapper_callable makes of them.

    param_init_fn: called with each module that has parameters or buffers of its own on
    the meta device, to give it values on the CPU; without it _init_weights(module) of a
    module around, as transformers' models have, or the module's reset_parameters().
    sync_module_states: all ranks begin with the first one's values, of which each has a
    unit's at a time; only that rank needs some, and on others modules may be on meta.

    What only a compiler or a TPU needs has nothing to do here: the optimization
    barriers, mark_step_on_finalization, sync_on_finalization, pin_layout,
    coalesce_all_gather_ops, reduce_scatter_bucket_size_mb and _use_xla_patched_linear.
    execute_sharding_on_init waits for the other ranks, without on_neuron; the full
    parameters are gone in any case. _debug_dummy_all_gather_op and its like leave the
    other ranks out. watch_released ends the process where a parameter is used that is
    not gathered, rather than reading zeros. return_memory: malloc gives
    freed blocks above 1 MiB back to the system, in the whole process, and shorter ones
    before memory is shortest; else what the activations of one step leave behind
    stays, and sharding saves little on the CPU.

    Raises RuntimeError for a module that is wrapped already or has no forward,
    ValueError for dtypes and groups that make no sense, TypeError for parameters that
    are not float32, AssertionError for rows that the ranks do not divide.

    Source: torch_xla's XlaFullyShardedDataParallel, whose names, files and states it
    has; Rajbhandari et al., "ZeRO", 2020.
    """

    # ---- roots

    def _lazy_init(self) -> None:
        """The first unit that is called is the root of those below it, also of those
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
                unit._unit.path = shard_metadata.original_name(f"{name}.").rstrip(".")
                unit._unit.label = unit._unit.path or "the root"
        self._unit.set_units([unit._unit for unit in self.units()])
        if self.disable_reshard_on_root:
            self.reshard_after_forward = False
        if self._debug_print and self.rank == 0:
            print(
                f"root FSDP got {len(list(self.parameters()))} total params "
                f"(_debug_msg: {self._debug_msg}).",
                flush=True,
            )

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
        if self._unit.state == TrainingState.SUMMON_FULL_PARAMS.value:
            return self.module(*args, **kwargs)
        self._lazy_init()
        if self._is_root and not self._is_alike:
            shard_metadata.compare(self, self.units())
            self._is_alike = True
        if self.compute_dtype != torch.float32:
            args, kwargs = cast_floats(self.compute_dtype, (args, kwargs))
        run = self._dummy_forward if self._debug_dummy_forward_pass else self.module
        return self._unit.forward(run, args, kwargs, self._watched)

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
        another is rejected. Returns the norm that it was, a float32 scalar. Collective.
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
            self.params_with_grad,
            float(max_norm),
            float(norm_type),
            self._debug_dummy_all_reduce_op,
        )
        return torch.tensor(total, dtype=torch.float32, device=self.home.device)

    # ---- the full parameters

    @contextlib.contextmanager
    def summon_full_params(
        self, recurse: bool = True, writeback: bool = True
    ) -> Iterator[None]:
        """Within it the module's parameters have all their values, in float32, and
        named_parameters() yields them rather than the shards. Collective.

        Units that are called run with these, on any rank, and gather nothing.

        recurse: those of inner units too. writeback: what is changed, alike on all
        ranks, goes into the shards at the end. Raises RuntimeError for a parameter that
        was replaced by another.
        """
        self._assert_idle()
        with full_params.summoned(self.units() if recurse else [self], writeback):
            yield

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Call fn with every module below and this one, the parameters gathered; what
        is changed, alike on all ranks, goes into the shards. Collective.

        Units gather one at a time, those around others meanwhile.
        """
        if self.training_state is TrainingState.SUMMON_FULL_PARAMS:
            return super().apply(fn)
        with self.summon_full_params(recurse=False):
            return super().apply(fn)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """What the unwrapped module's state_dict() would be, a copy. Collective; also
        in summon_full_params(), whose changes it has."""
        self._unit.recover()
        self.assert_state([TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS])
        return full_params.state_dict(self, self.units())

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Take every rank's part out of the unwrapped module's state_dict().

        Raises RuntimeError naming the keys that are missing or unknown (strict) and
        parameters of other shapes; nothing is loaded then.
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

    def feedback_state_dict(self) -> dict[str, torch.Tensor]:
        """What codes have missed of gradients on this rank, float32, by unit.

        Empty without reduce_bits and error_feedback.
        """
        return state_dict(self)

    def load_feedback_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what feedback_state_dict() gave on this rank.

        Raises ValueError where it is of other units or another number of ranks.
        """
        load_state_dict(self, state)

    # ---- names and metadata

    def get_original_names_and_sharded_parameters(
        self,
    ) -> list[tuple[str, nn.Parameter]]:
        """Like named_parameters(), with the names before wrapping."""
        if self.use_orig_params:
            return list(self.named_parameters())
        return [
            (
                shard_metadata.original_name(
                    shard_metadata.join(name, shard._orig_name)
                ),
                shard,
            )
            for name, unit in self.named_modules()
            if isinstance(unit, FullyShardedDataParallel)
            for shard in unit.sharded_params
        ]

    def get_shard_metadata(self) -> dict[str, Any]:
        """What consolidate_sharded_model_checkpoints needs beside the shards.

        shard_info: by unit, for each shard the size and the name of what it is part
        of; flatten_info: for each flat parameter (names, shapes, numels); buffer_info:
        the dtypes that buffers had; shared_info: the other names of tied parameters;
        world_size and rank; shard_param_on_dim_0 and shard_size_multiple: how
        parameters are divided.
        """
        return shard_metadata.shard_metadata(self, FullyShardedDataParallel)


XlaFullyShardedDataParallel = FullyShardedDataParallel
