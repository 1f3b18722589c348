"""Learning-rate schedules of transformers, in C, for optimizers of any framework.

An optimizer is anything whose param_groups is a list of dicts with "lr", a float or a
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrainer._C import GreedyLR, LRScheduler, ReduceLROnPlateau, Schedule
from ctrainer.arguments.settings import plain, read_keywords

__all__ = [
    "GreedyLR",
    "LRScheduler",
    "ReduceLROnPlateau",
    "Schedule",
    "get_scheduler",
    "is_stepped_on_metric",
]

ON_METRIC: dict[str, type[Any]] = {
    "reduce_lr_on_plateau": ReduceLROnPlateau,
    "greedy": GreedyLR,
}


def get_scheduler(
    name: str,
    optimizer: Any,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return a learning-rate scheduler, as transformers.get_scheduler does.

    name is one of transformers' twelve, a str or a member of its SchedulerType;
    scheduler_specific_kwargs are that schedule's options under transformers' names.
    Steps that a schedule does not read are passed over: "constant" reads neither count,
    "reduce_lr_on_plateau" and "greedy" are stepped with a metric.

    Raises:
        ValueError: the name is unknown, a number of steps or an option that the
            schedule needs is missing, or it does not have the option, or its value is
            out of range.
        TypeError: an option is of the wrong type.
    """
    name = str(getattr(name, "value", name))
    options: dict[str, Any] = plain(dict(scheduler_specific_kwargs or {}))
    if hasattr(optimizer, "optimizer_dict"):
        raise ValueError(
            f"{type(optimizer).__name__} steps one optimizer for each parameter; make "
            "a scheduler for each of its optimizer_dict's optimizers"
        )
    if name in ON_METRIC:
        return _on_metric(name, optimizer, options)
    last_epoch = options.pop("last_epoch", -1)
    return LRScheduler(
        optimizer, name, num_warmup_steps, num_training_steps, options, last_epoch
    )


def _on_metric(name: str, optimizer: Any, options: dict[str, Any]) -> Any:
    cls = ON_METRIC[name]
    options = read_keywords(cls, options, f"schedule '{name}'")
    try:
        return cls(optimizer, **options)
    except TypeError as error:
        raise TypeError(f"schedule '{name}': {error}") from None


def is_stepped_on_metric(scheduler: Any) -> bool:
    """Is it one of ours that is stepped with an evaluation's metric?"""
    return isinstance(scheduler, (ReduceLROnPlateau, GreedyLR))
