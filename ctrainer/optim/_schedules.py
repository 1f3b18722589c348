"""Learning-rate schedules by name."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer._C import LRScheduler

NATIVE_SCHEDULES = ("constant", "constant_with_warmup", "cosine", "linear")


def get_scheduler(
    name: str,
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return a learning-rate scheduler, as transformers.get_scheduler does.

    "constant", "constant_with_warmup", "linear" and "cosine" are ours; any other name
    is made by transformers, which then has to be installed.

    Raises:
        ValueError: a number of steps that the schedule needs is missing.
    """
    name = str(getattr(name, "value", name))
    options = dict(scheduler_specific_kwargs or {})
    if name not in NATIVE_SCHEDULES or options.keys() - {"num_cycles", "last_epoch"}:
        import transformers

        return transformers.get_scheduler(
            name, optimizer, num_warmup_steps, num_training_steps, options
        )
    if name != "constant" and num_warmup_steps is None:
        raise ValueError(f"{name} needs num_warmup_steps; got None")
    if name in ("linear", "cosine") and num_training_steps is None:
        raise ValueError(f"{name} needs num_training_steps; got None")
    return LRScheduler(
        optimizer, name, num_warmup_steps or 0, num_training_steps or 0, **options
    )
