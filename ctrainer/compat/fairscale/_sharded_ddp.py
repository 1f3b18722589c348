"""ShardedDataParallel: averaged gradients for an OSS."""

from __future__ import annotations

from typing import Any

from torch import nn

from ctrainer import _C
from ctrainer.adapters import parallel
from ctrainer.comm.data_parallel import DataParallel
from ctrainer.compat.fairscale._groups import communicator_of
from ctrainer.compat.fairscale._oss import OSS


class ShardedDataParallel(DataParallel):
    """ctrainer.DataParallel under fairscale's name and arguments.

    sharded_optimizer: the OSS, or a list of them, that updates the module.
    reduce_buffer_size: elements of a bucket of gradients; 0: torch's 25 MiB.
    sync_models_at_startup: parameters and buffers become those of rank 0.
    Every rank gets the averages of all gradients, where fairscale sends each to the
    rank that updates the parameter. auto_refresh_trainable and
    warn_on_trainable_params_changed are no choices: wrap the module anew after changing
    requires_grad.

    Raises ValueError for reduce_fp16=True, and where the OSS has other ranks.
    """

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
        if reduce_fp16:
            raise ValueError(
                "reduce_fp16=True rounds the averages of gradients; leave it out, or "
                "train a model of bfloat16"
            )
        group = communicator_of(process_group)
        optimizers = (
            sharded_optimizer
            if isinstance(sharded_optimizer, list)
            else [sharded_optimizer]
        )
        for optimizer in optimizers:
            if optimizer.world_size != group.world_size:
                raise ValueError(
                    f"the OSS is of {optimizer.world_size} ranks, process_group has "
                    f"{group.world_size}"
                )
        cap = reduce_buffer_size * 4 / 2**20 if reduce_buffer_size > 0 else None
        super().__init__(
            module,
            group,
            bucket_cap_mb=cap,
            find_unused_parameters=True,
            broadcast_buffers=broadcast_buffers,
            init_sync=sync_models_at_startup,
        )
        self._sharded_optimizers = optimizers

    def sync_buffers(self, blocking: bool = False) -> None:
        """Make the buffers those of rank 0. Collective; blocking is no choice."""
        buffers = parallel.shared_buffers(self.module)
        _C.broadcast_tensors(self.communicator, buffers)
