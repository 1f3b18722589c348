"""ShardedDataParallel: averaged gradients, each for the rank whose OSS updates it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.adapters import parallel
from ctrainer.comm.data_parallel import DataParallel
from ctrainer.compat.fairscale._groups import communicator_of
from ctrainer.compat.fairscale._oss import OSS

logger = logging.getLogger(__name__)


class ShardedDataParallel(DataParallel):
    """Averages each gradient over the ranks, for the one that updates the parameter.

    On the others the gradient is None after the backward pass, and its memory is given
    back during it. Parameters of the module that no OSS updates have their averages on
    all ranks; those of an OSS that are not in the module are averaged, too.

    module, sharded_optimizer: the OSS, or a list of them, that updates it.
    reduce_buffer_size: elements, at most, of the buffer that each rank's short
    gradients of a dtype are exchanged in, which stays; 0: each gradient by itself.
    reduce_fp16: gradients travel in 16 bits, with buffers, too (fairscale: without
    alone). sync_models_at_startup, broadcast_buffers: parameters and buffers become
    those of rank 0 at the beginning, buffers before each forward pass.
    auto_refresh_trainable: requires_grad may change between passes, else
    refresh_trainable() says so; warn_on_trainable_params_changed: it is logged.

    As in fairscale, gradients in eval() mode are each rank's own, OSS.clip_grad_norm
    clips, and ShardedGradScaler scales. join() and the hooks that need whole averages
    are rejected with ValueError, and so is an OSS of other ranks.

    Source: Rajbhandari et al., "ZeRO", 2020, stage 2; names and arguments of fairscale,
    fairscale/nn/data_parallel/sharded_ddp.py.
    """

    is_multi_device_module = False
    device_type = "cpu"

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | list[OSS],
        process_group: Any = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        group = communicator_of(process_group)
        several = isinstance(sharded_optimizer, list)
        optimizers: Any = sharded_optimizer if several else [sharded_optimizer]
        self._sharded_optimizers: list[OSS] = optimizers
        self._check_ranks(group)
        self._auto_refresh_trainable = auto_refresh_trainable
        self._warns = warn_on_trainable_params_changed
        self._reduce_fp16 = reduce_fp16
        super().__init__(
            module,
            group,
            bucket_cap_mb=max(reduce_buffer_size, 1) * 4 / 2**20,
            find_unused_parameters=True,
            broadcast_buffers=broadcast_buffers,
            init_sync=sync_models_at_startup,
        )

    def _check_ranks(self, group: _C.Communicator) -> None:
        for optimizer in self._sharded_optimizers:
            if optimizer.world_size != group.world_size:
                raise ValueError(
                    f"the OSS is of {optimizer.world_size} ranks, process_group has "
                    f"{group.world_size}"
                )

    # ---- whose gradients

    def _named(self) -> dict[str, torch.Tensor]:
        """All that may be trained, by name."""
        named: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        known = set(named.values())
        for number, optimizer in enumerate(self._sharded_optimizers):
            for index, param in enumerate(optimizer.owners()):
                if param not in known:
                    named[f"sharded_optimizer.{number}.{index}"] = param
        return named

    def _new_reducer(self) -> _C.GradReducer:
        self._seen = parallel.are_trainable(self._named().values())
        skipped = parallel.ignored(self.module)
        named = {
            name: param
            for name, param in self._named().items()
            if param.requires_grad and name not in skipped
        }
        owners: dict[torch.Tensor, int] = {}
        for optimizer in self._sharded_optimizers:
            owners |= optimizer.owners()
        made = self._reducer_of(named, [owners.get(p, -1) for p in named.values()])
        made.compress("fp16" if self._reduce_fp16 else "no")
        return made

    def refresh_trainable(self) -> None:
        """Take note of changes of requires_grad: buffers are made anew."""
        for optimizer in self._sharded_optimizers:
            optimizer.refresh_trainable()
        self.reducer.close()
        self.reducer = self._new_reducer()

    def _refresh_if_changed(self) -> None:
        if self._seen == parallel.are_trainable(self._named().values()):
            return
        if self._warns:
            logger.warning(
                "requires_grad of parameters has changed: the buffers of gradients are "
                "made anew"
            )
        self.refresh_trainable()

    # ---- passes

    def _syncs(self) -> bool:
        return super()._syncs() and self.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._auto_refresh_trainable:
            self._refresh_if_changed()
        sends = self.broadcast_buffers and self.require_backward_grad_sync
        if sends and not self._syncs():
            self.sync_buffers()
        return super().forward(*inputs, **kwargs)

    def reduce(self) -> None:
        """Average what no_sync() has left: after the backward pass. Collective."""
        self.reducer.reduce()

    def sync_buffers(self, blocking: bool = False) -> None:
        """Make the buffers those of rank 0. Collective; blocking is no choice."""
        buffers = parallel.shared_buffers(self.module)
        _C.broadcast_tensors(self.communicator, buffers)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set the gradients to zero, or to None."""
        super().zero_grad(set_to_none)

    def to(  # type: ignore[override]
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> ShardedDataParallel:
        """Cast parameters and buffers of floating point to dtype.

        Raises ValueError for a device other than the CPU.
        """
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(
                f"device is {device}; gradients are exchanged in host memory: cpu"
            )
        self.module.to(dtype=dtype, non_blocking=non_blocking)
        self.refresh_trainable()
        return self
