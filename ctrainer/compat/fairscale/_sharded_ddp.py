"""ShardedDataParallel: averaged gradients, each for the rank whose OSS updates it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.comm import parallel
from ctrainer.comm.data_parallel import DataParallel
from ctrainer.compat.fairscale._groups import communicator_of
from ctrainer.compat.fairscale._oss import OSS

logger = logging.getLogger(__name__)


class ShardedDataParallel(DataParallel):
    """A module whose gradients are averaged over the ranks, each for the rank that
    updates the parameter.

    On other ranks the gradient is None after the backward pass, and its memory is freed
    during the pass. Gradients of parameters that no OSS updates have their averages on
    all ranks; an OSS's parameters outside of the module are averaged, too. As in
    fairscale, gradients in eval() mode are each rank's own, OSS.clip_grad_norm clips,
    and ShardedGradScaler scales.

    Args:
        module (nn.Module): In host memory.
        sharded_optimizer (OSS | list[OSS]): The OSS, or a list of them, that updates
            it.
        process_group (default None): A Communicator, a group of torch.distributed, or
            None for all ranks.
        broadcast_buffers (bool, default True): Buffers become those of rank 0 before
            each forward pass.
        sync_models_at_startup (bool, default True): Parameters and buffers become those
            of rank 0 at the beginning.
        reduce_buffer_size (int, default 8388608): Elements, at most, of the buffer in
            which each rank's short gradients of a dtype are exchanged, which stays; 0:
            each gradient by itself.
        auto_refresh_trainable (bool, default True): requires_grad may change between
            passes, else refresh_trainable() has to be called.
        reduce_fp16 (bool, default False): Send gradients in fp16, with buffers, too
            (fairscale: only without).
        warn_on_trainable_params_changed (bool, default True): Log such a change.

    Raises:
        ValueError: an OSS of other ranks; join() and hooks that need whole averages.

    Source: Rajbhandari et al., "ZeRO", 2020, stage 2; names and arguments of fairscale,
    fairscale/nn/data_parallel/sharded_ddp.py.

    Example:
        >>> import torch
        >>> from ctrainer.compat.fairscale import OSS, ShardedDataParallel
        >>> module = torch.nn.Linear(3, 2)
        >>> optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.1)
        >>> model = ShardedDataParallel(module, optimizer)
        >>> model(torch.ones(1, 3)).sum().backward()
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
        """Make the buffers those of rank 0. Collective.

        Args:
            blocking (bool, default False): No effect.
        """
        buffers = parallel.shared_buffers(self.module)
        _C.broadcast_tensors(self.communicator, buffers)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the gradients, or fill them with zeros.

        Args:
            set_to_none (bool, default False): Drop them.
        """
        super().zero_grad(set_to_none)

    def to(  # type: ignore[override]
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> ShardedDataParallel:
        """Cast parameters and buffers of floating point, and return this module.

        Args:
            device (torch.device | str | None): The CPU, or None.
            dtype (torch.dtype | None, default None): The dtype; None: as they are.
            non_blocking (bool, default False): As torch's.

        Raises:
            ValueError: another device.
        """
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(
                f"device is {device}; gradients are exchanged in host memory: cpu"
            )
        self.module.to(dtype=dtype, non_blocking=non_blocking)
        self.refresh_trainable()
        return self
