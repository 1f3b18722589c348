"""checkpoint_wrapper: a module that computes its activations again in the backward."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


class _Thread(threading.local):
    """What a thread is doing: autograd has threads of its own."""

    checkpointing = recomputing = disabled = False


_thread = _Thread()


@contextlib.contextmanager
def _now(name: str) -> Iterator[None]:
    before = getattr(_thread, name)
    setattr(_thread, name, True)
    try:
        yield
    finally:
        setattr(_thread, name, before)


def disable_checkpointing() -> contextlib.AbstractContextManager[None]:
    """Return a context in which, in this thread, modules keep their activations."""
    return _now("disabled")


def is_checkpointing() -> bool:
    """Return whether a forward pass runs whose activations are not kept."""
    return _thread.checkpointing


def is_recomputing() -> bool:
    """Return whether such a forward pass runs again, for the backward pass."""
    return _thread.recomputing


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """Let the module keep its inputs instead of its activations, and return it.

    Its forward may take keywords and return anything. Batch normalisation updates its
    running statistics once a step.

    Args:
        module (nn.Module): The module.
        offload_to_cpu (bool, default False): The inputs wait in host memory.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; names of
    fairscale, fairscale/nn/checkpoint.
    """
    module._offloads_to_cpu = offload_to_cpu  # type: ignore[assignment]
    module.forward = types.MethodType(_checkpointed_forward, module)
    return module


def _checkpointed_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    forward = type(module).forward
    if not torch.is_grad_enabled() or _thread.disabled:
        return forward(module, *args, **kwargs)
    with save_on_cpu() if module._offloads_to_cpu else contextlib.nullcontext():
        return checkpoint(
            forward,
            module,
            *args,
            use_reentrant=False,
            context_fn=functools.partial(_contexts, module),
            **kwargs,
        )


def _contexts(module: nn.Module) -> tuple[Any, Any]:
    """Of the forward, and of its repetition."""
    return _now("checkpointing"), _again(module)


@contextlib.contextmanager
def _again(module: nn.Module) -> Iterator[None]:
    with _now("recomputing"), _frozen_statistics(module):
        yield


@contextlib.contextmanager
def _frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Momentum 0 leaves the running statistics as they are, bit for bit."""
    norms: list[Any] = [
        norm
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.num_batches_tracked is not None
    ]
    kept = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(batches)
