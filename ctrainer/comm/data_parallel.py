"""A module whose gradients are averaged over a group of ranks, in C."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ctrainer import _C
from ctrainer.comm import nccl, parallel
from ctrainer.comm.run import world

logger = logging.getLogger("ctrainer.comm")


def is_wrapped(module: Any) -> bool:
    """Whether something averages this module's gradients already: torch or ours."""
    return isinstance(module, DistributedDataParallel | DataParallel)


class ModuleShown(nn.Module):
    """A wrapper that shows the attributes of the module within."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)


class DataParallel(ModuleShown):
    """A module that every rank has, each with a part of the batch; gradients become
    averages.

    The average is taken while the backward pass runs: a bucket of gradients is
    exchanged as soon as all of it is there. At the beginning parameters and buffers
    become those of rank 0. Every rank has to make it, with the same arguments, and to
    run forward and backward as often as the others. Parameters may be frozen, and
    trained later, between updates, on all ranks alike (torch's wrapper leaves gradients
    of the latter to each rank). state_dict() has the names of `module` with "module."
    before them, as torch's has. Other attributes are the module's.

    Args:
        module (nn.Module): On one device, its parameters of any floating point dtypes.
        communicator (_C.Communicator | None, default None): The ranks; None:
            comm.world().
        bucket_cap_mb (float | None, default None): The size of a bucket in MiB; None:
            25. The first bucket of each dtype has 1 MiB.
        find_unused_parameters (bool, default False): Parameters without a gradient
            count as zeros rather than being an error.
        static_graph (bool, default False): The same parameters get gradients as often
            in every pass.
        gradient_as_bucket_view (bool, default True): Gradients are views of the
            buckets, whose memory they share; torch has False.
        broadcast_buffers (bool, default True): Buffers become those of rank 0 in each
            forward pass.
        init_sync (bool, default True): Rank 0's parameters and buffers for all, after a
            check that all have the same names, shapes and dtypes.
        comm_hook (Any, default None): As in register_comm_hook; None: no hook.

    Raises:
        ValueError: the ranks' modules differ, nothing is to be trained, or parameters
            are on several devices, or on a GPU without the plugin ctrainer._cuda.
        TypeError: a parameter is not of floating point.
        RuntimeError: another rank fails, or stays away, or NCCL, which averages on
            GPUs, cannot be found; in backward(): parameters got no gradient, or got a
            second one.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training", 2020.

    Example:
        >>> import torch
        >>> from ctrainer import DataParallel
        >>> model = DataParallel(torch.nn.Linear(3, 2))  # on each rank
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> model.module.weight.grad.shape
        torch.Size([2, 3])
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        communicator: _C.Communicator | None = None,
        *,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        comm_hook: Any = None,
    ) -> None:
        super().__init__()
        _check(module)
        self.module = module
        self.communicator = world() if communicator is None else communicator
        device = next(iter(parallel.trainable(module).values())).device
        if device.type != "cpu":
            nccl.serve(self.communicator, device)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        if init_sync:
            synchronize(module, self.communicator)
        self.bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        self._compression = "no"
        self._frozen: list[torch.Tensor] = []
        self._joins = False
        self.reducer = self._new_reducer()
        if comm_hook is not None:
            self.register_comm_hook(None, comm_hook)

    def _new_reducer(self) -> _C.GradReducer:
        self._frozen = parallel.frozen(self.module)
        made = self._reducer_of(parallel.trainable(self.module))
        made.compress(self._compression)
        return made

    def _take_in_trainable(self) -> None:
        """Average the gradients of parameters, too, that were frozen up to now."""
        if self._joins:
            raise RuntimeError(
                "parameters were made trainable within join(), where ranks take part "
                "in passes with those that they had: do it before"
            )
        self.reducer.close()
        self.reducer = self._new_reducer()

    def _reducer_of(
        self, named: Mapping[str, torch.Tensor], owners: list[int] | None = None
    ) -> _C.GradReducer:
        return _C.GradReducer(
            self.communicator,
            list(named.values()),
            list(named),
            parallel.allocate,
            parallel.queue_callback,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            owners=owners,
        )

    def _syncs(self) -> bool:
        """Whether the backward pass of a forward pass that begins is exchanged."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return its output; the backward pass averages gradients.

        Args:
            *inputs, **kwargs: Of the module's forward.
        """
        with_grad, syncs = torch.is_grad_enabled(), self._syncs()
        if with_grad and any(parameter.requires_grad for parameter in self._frozen):
            self._take_in_trainable()
        buffers = self._buffers_to_send() if syncs else ()
        self.reducer.before_forward(with_grad, syncs, buffers)
        output = self.module(*inputs, **kwargs)
        if with_grad:
            self.reducer.after_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of passes that begin in the block stay each rank's own, and add
        up.

        Yields:
            None; the first pass after it averages the sum. Its forward pass counts, as
            in torch.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks have different numbers of batches.

        At the end of its block a rank takes part in the passes of those that continue,
        with gradients of zero, and at last all have the parameters and buffers of one
        that was the last to train.

        Args:
            divide_by_initial_world_size (bool, default True): Divide sums of gradients
                by the number of all ranks; else by that of those with data.
            enable (bool, default True): False: the block has no effect at all.
            throw_on_early_termination (bool, default False): Let all raise RuntimeError
                as soon as one has no data.

        Yields:
            None.
        """
        if not enable:
            yield
            return
        self.reducer.join(divide_by_initial_world_size, throw_on_early_termination)
        self._joins = True
        try:
            yield
        finally:
            self._joins = False
        tensors = list(parallel.shared_tensors(self.module).values())
        self.reducer.shadow(self._buffers_to_send(), tensors)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Choose how gradients travel: before the first pass, the same on every rank.

        Args:
            state: Not read; torch's hooks of these kinds do not either.
            hook: "no", "fp16" or "bf16", accelerate's DDPCommunicationHookType of
                these, or torch's hook of that kind.

        Raises:
            ValueError: another hook.
        """
        name = _name_of(hook)
        self.reducer.compress(name)
        self._compression = name

    def _buffers_to_send(self) -> list[torch.Tensor]:
        """What rank 0 sends before a forward pass in which batch statistics count."""
        return parallel.shared_buffers(self.module) if self.broadcast_buffers else []


def on_gpu(
    module: nn.Module, communicator: _C.Communicator, args: Any, **options: Any
) -> nn.Module:
    """The wrapper of a module on a GPU: ours over NCCL; torch's for another
    args.ddp_backend or, with a warning that says why, where the plugin or NCCL is
    missing."""
    reason = nccl.why_not_served(communicator, args.device, args.ddp_backend)
    if reason:
        logger.warning(
            "torch's DistributedDataParallel averages the gradients, and the host "
            "waits for the GPU in each update: %s",
            reason,
        )
        return DistributedDataParallel(module, device_ids=[args.device], **options)
    return DataParallel(module, communicator, **options)


def synchronize(module: nn.Module, communicator: _C.Communicator) -> None:
    """Make parameters and buffers those of rank 0.

    Raises ValueError on all ranks, naming the first difference, unless all have the
    same names, shapes and dtypes.
    """
    tensors = parallel.shared_tensors(module)
    both = dict(module.named_parameters()) | dict(module.named_buffers())
    lines = parallel.describe({name: both[name] for name in tensors})
    _C.check_ranks_agree(communicator, "parameter or buffer", lines)
    _C.broadcast_tensors(communicator, list(tensors.values()))


_HOOKS = {
    "allreduce_hook": "no",
    "fp16_compress_hook": "fp16",
    "bf16_compress_hook": "bf16",
}


def _name_of(hook: Any) -> str:
    if isinstance(hook, Enum):
        hook = hook.value
    if isinstance(hook, str):
        return hook
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
    if name in _HOOKS and module.startswith("torch.distributed."):
        return _HOOKS[name]
    raise ValueError(
        f"gradients cannot be compressed by {hook!r}: hooks run in C. Expected no, "
        "fp16 or bf16, or torch's hook of that kind; others are for torch's "
        "DistributedDataParallel"
    )


def _check(module: nn.Module) -> None:
    if is_wrapped(module):
        raise ValueError(
            f"the module is a {type(module).__name__} already, whose gradients are "
            "averaged; wrap what is in it, its .module"
        )
    if not parallel.trainable(module):
        raise ValueError(
            f"no parameter of this {type(module).__name__} needs a gradient, so there "
            "is nothing to average: use the module as it is"
        )
