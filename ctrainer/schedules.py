"""Learning-rate schedules of transformers, in C, for optimizers of any framework.

An optimizer is anything whose param_groups is a list of dicts with "lr", a float or a
tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from ctrainer._C import LRScheduler, Schedule
from ctrainer.arguments.settings import plain, read_keywords

__all__ = ["LRScheduler", "Schedule", "get_scheduler"]

ON_METRIC = ("reduce_lr_on_plateau", "greedy")


def get_scheduler(
    name: str,
    optimizer: Any,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return a learning-rate scheduler, as transformers.get_scheduler does.

    Args:
        name (str): One of transformers' twelve schedules, a str or a member of its
            SchedulerType. "reduce_lr_on_plateau" is torch's ReduceLROnPlateau and
            "greedy" transformers' GreedyLR, for optimizers of torch; both are stepped
            with a metric.
        optimizer: Anything whose param_groups is a list of dicts with "lr", a float or
            a tensor.
        num_warmup_steps (int | None, default None): Updates of the warm-up. A schedule
            that has none ignores it.
        num_training_steps (int | None, default None): Updates of the run. A schedule
            without an end ignores it: "constant" reads neither count.
        scheduler_specific_kwargs (Mapping[str, Any] | None, default None): That
            schedule's options under transformers' names; None: none.

    Args of scheduler_specific_kwargs:
        num_cycles (float): Periods of the cosine: by default 0.5, which falls to 0
            once, and 1 with restarts.
        power (float): Exponent of the polynomial.
        lr_end (float): The polynomial's last learning rate, below the base.
        timescale (float): n updates after the warm-up the learning rate is the base
            times sqrt(timescale / (timescale + n)); by default the warm-up, or 10,000.
        min_lr (float): The least learning rate; this or min_lr_rate is needed.
        min_lr_rate (float): The same as a fraction of the base.
        warmup_lr_rate (float): The fraction of the base that the warm-up begins with;
            by default 1 / num_warmup_steps.
        num_stable_steps (int): Updates between the warm-up and the decay; by default
            the rest of the run.
        num_decay_steps (int): Updates of the decay.
        warmup_type (str): The form of the warm-up: "linear", "cosine" or "1-sqrt".
        decay_type (str): That of the decay.
        min_lr_ratio (float): The fraction of the base at both ends.

    Returns:
        An LRScheduler, for an optimizer of torch one that is torch's LambdaLR, too; or
        the class of torch or transformers named above.

    Raises:
        ValueError: the name is unknown, a number of steps or an option that the
            schedule needs is missing, or it does not have the option, or its value is
            out of range.
        TypeError: an option is of the wrong type, or the optimizer not one of torch's.
        ImportError: the package that has the schedule is missing or older than it.

    Example:
        >>> from ctrainer.optim import get_scheduler
        >>> class Optimizer:
        ...     param_groups = [{"lr": 1.0}]
        >>> optimizer = Optimizer()
        >>> scheduler = get_scheduler("linear", optimizer, 0, num_training_steps=4)
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.75
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
    return _class_for(optimizer)(
        optimizer, name, num_warmup_steps, num_training_steps, options, last_epoch
    )


def _class_for(optimizer: Any) -> Any:
    torch = sys.modules.get("torch")
    of_torch = torch is not None and isinstance(optimizer, torch.optim.Optimizer)
    return _class_of_torch() if of_torch else LRScheduler


@functools.cache
def _class_of_torch() -> Any:
    """An LRScheduler that is torch's LambdaLR to isinstance() and to accelerate; steps
    and states are C's."""
    from torch.optim.lr_scheduler import LambdaLR

    # The others are read by torch's get_lr().
    names = {
        "__module__": __name__,
        "_get_lr_called_within_step": False,
        "_is_initial": False,
    }
    return type("LambdaLR", (LRScheduler, LambdaLR), names)


def __getattr__(name: str) -> Any:
    if name == "LambdaLR":  # for pickle
        return _class_of_torch()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _on_metric(name: str, optimizer: Any, options: dict[str, Any]) -> Any:
    """torch's ReduceLROnPlateau, or for "greedy" transformers' GreedyLR."""
    import torch

    cls: Any = torch.optim.lr_scheduler.ReduceLROnPlateau
    if name == "greedy":
        try:
            from transformers.optimization import GreedyLR as cls
        except ImportError as error:
            raise ImportError(
                "schedule 'greedy' is transformers' GreedyLR, which the installed "
                "transformers, if any, does not have: pip install -U transformers"
            ) from error
    where = f"schedule '{name}'"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{where} is {cls.__name__} of {cls.__module__}, which needs an optimizer "
            f"of torch, not {type(optimizer).__name__}"
        )
    return cls(optimizer, **read_keywords(cls, options, where))
