"""ShardedGradScaler: a loss scale that all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer.compat.fairscale._groups import communicator_of


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for gradients of which each rank has a shard.

    An Inf or NaN on one rank makes all of them leave out the update and lower the
    scale. Unlike torch.cuda.amp's it also works on CPUs.

    Args:
        init_scale (float, default 65536.0): The first factor of the loss.
        growth_factor (float, default 2.0): Of the factor, after growth_interval updates
            without overflow.
        backoff_factor (float, default 0.5): Of the factor, at an overflow.
        growth_interval (int, default 2000): Updates.
        enabled (bool, default True): False: scale nothing.
        process_group (default None): A Communicator, a group of torch.distributed, or
            None for all ranks.

    Example:
        >>> from ctrainer.compat.fairscale import ShardedGradScaler
        >>> ShardedGradScaler(init_scale=8.0).get_scale()
        8.0
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.group = process_group
        self._communicator = communicator_of(process_group) if enabled else None

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and find Inf and NaN on all ranks.
        Collective.

        Args:
            optimizer (torch.optim.Optimizer): Whose gradients.
        """
        super().unscale_(optimizer)
        if self._communicator is None:
            return
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        worst = torch.zeros(1, dtype=torch.float32, device="cpu")
        for value in found.values():
            worst = torch.maximum(worst, value.cpu().reshape(1))
        self._communicator.all_reduce(worst, "max")
        if not found:  # this rank has no gradients
            found[torch.device("cpu")] = worst.reshape(())
        for value in found.values():
            value.fill_(float(worst))
