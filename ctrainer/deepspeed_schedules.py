"""DeepSpeed's five learning-rate schedules: its classes and parameters, formulas in C.

An optimizer is anything with param_groups, or a wrapper of one as its `optimizer`.
Batches are counted from 0; last_batch_iteration is -1 before the first. Deepspeed need
not be installed. Source: DeepSpeed, runtime/lr_schedules.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, cast

from ctrainer._C import Schedule, write_lrs
from ctrainer.arguments.settings import reject_unknown

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

logger = logging.getLogger("ctrainer.deepspeed_schedules")

PerGroup = float | Sequence[float]
P = ParamSpec("P")


def _knows_its_options(init: Callable[P, None]) -> Callable[P, None]:
    """An __init__ that rejects other names, of a DeepSpeed config's scheduler.params
    say, with the nearest of its own."""
    known = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        reject_unknown(f"schedule {type(args[0]).__name__!r}", options, known)
        init(*args, **options)

    return checked


# Options that may be one number for all groups, or one for each.
_PER_GROUP = {
    "lr", "lr_range_test_min_lr", "cycle_min_lr", "cycle_max_lr", "cycle_min_mom",
    "cycle_max_mom", "warmup_min_lr", "warmup_max_lr",
}  # fmt: skip


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, of its locals()."""
    return {k: v for k, v in arguments.items() if k not in ("self", "__class__")}


class _Scheduler:
    """A learning rate for each group, which the number of batches decides."""

    _name: ClassVar[str]

    def __init__(
        self, optimizer: Any, last_batch_iteration: int, **options: Any
    ) -> None:
        self.optimizer = _unwrapped(optimizer)
        self._schedules = _schedules(self._name, options, self.optimizer)
        self.last_batch_iteration = _batch(last_batch_iteration)
        self._last_lr = _own_lrs(self.optimizer)
        if self.last_batch_iteration == -1:
            self._go_to(-1)

    def _go_to(self, batch: int) -> None:
        self.last_batch_iteration = batch
        lrs = self.get_lr()
        write_lrs(self.optimizer, lrs)
        self._last_lr = lrs

    def get_lr(self) -> list[float]:
        """Return each group's learning rate at last_batch_iteration."""
        return [schedule(self.last_batch_iteration) for schedule in self._schedules]

    def get_last_lr(self) -> list[float]:
        """Return the learning rates last written, at first the groups' own."""
        return list(self._last_lr)

    def step(self, batch_iteration: int | None = None) -> None:
        """Go to the next batch, or to the one given, and write its learning rates.

        Args:
            batch_iteration (int | None, default None): From 0; None: the next.
        """
        following = self.last_batch_iteration + 1
        self._go_to(following if batch_iteration is None else batch_iteration)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last batch, as DeepSpeed does."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Load a state; the groups' learning rates come with the optimizer's state.

        Args:
            sd (Mapping[str, Any]): What state_dict() returned.
        """
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._last_lr = self.get_lr()


class _AfterWarmup(_Scheduler):
    """Those whose step() calls its argument by another name."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next batch, or to the one given, and write its learning rates.

        Args:
            last_batch_iteration (int | None, default None): From 0; None: the next.
        """
        super().step(last_batch_iteration)


def _batch(value: Any) -> int:
    """The number of a batch; raises ValueError for what is none."""
    with contextlib.suppress(TypeError):
        batch = operator.index(value)
        if abs(batch) < 2**53:
            return batch
    raise ValueError(
        f"last_batch_iteration is {value!r}; expected the number of the batch before "
        "the first, or -1"
    )


def _schedules(name: str, options: Mapping[str, Any], of: Any) -> list[Schedule]:
    """A formula for each group of the optimizer."""
    groups = len(of.param_groups)
    lists = {k: _each(k, options[k], groups) for k in options.keys() & _PER_GROUP}
    own = ({key: values[g] for key, values in lists.items()} for g in range(groups))
    return [Schedule(f"deepspeed.{name}", {**options, **group}) for group in own]


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer itself, or the one in a wrapper that has no groups."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if hasattr(candidate, "param_groups"):
            return candidate
    raise TypeError(
        f"{type(optimizer).__name__} is no optimizer: it has no param_groups"
    )


def _own_lrs(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in _unwrapped(optimizer).param_groups]


def _each(name: str, value: PerGroup, groups: int) -> Sequence[float]:
    if not isinstance(value, (list, tuple)):
        return [cast("float", value)] * groups
    if len(value) != groups:
        raise ValueError(
            f"{name} has {len(value)} entries; expected one number, or one for each of "
            f"the optimizer's {groups} groups"
        )
    return value


class LRRangeTest(_Scheduler):
    """A learning rate that rises without end, to find where training diverges.

    Args:
        optimizer: Has param_groups with "lr".
        lr_range_test_min_lr (PerGroup, default 0.001): Where it begins, for all groups
            or each.
        lr_range_test_step_size (int, default 2000): Batches of a step.
        lr_range_test_step_rate (float, default 1.0): A step adds this times the
            beginning.
        lr_range_test_staircase (bool, default False): Rise at the ends of steps alone.
        last_batch_iteration (int, default -1): Batch before the first, to resume.

    Source: Smith, "A disciplined approach to neural network hyper-parameters: Part 1",
    arXiv 1803.09820.

    Example:
        >>> import torch
        >>> from ctrainer.deepspeed_schedules import LRRangeTest
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
        >>> schedule = LRRangeTest(optimizer, lr_range_test_min_lr=0.01)
        >>> schedule.step()
    """

    _name = "LRRangeTest"

    @_knows_its_options
    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(**_given(locals()))


class OneCycle(_Scheduler):
    """A learning rate that rises and falls once while the momentum falls and rises,
    then decay.

    The momentum is the first of each group's betas; the second becomes 0.99, as in
    DeepSpeed.

    Args:
        optimizer: Has param_groups with "lr".
        cycle_min_lr, cycle_max_lr (PerGroup): The ends of the cycle, for all groups or
            each.
        decay_lr_rate (float, default 0.0): Of the decay after the cycle.
        cycle_first_step_size (int, default 2000): Batches of the rise.
        cycle_second_step_size (int | None, default None): Batches of the fall; None: as
            many.
        cycle_first_stair_count (int, default 0): Stairs of the rise; 0: none.
        cycle_second_stair_count (int | None, default None): Stairs of the fall; None:
            as many.
        decay_step_size (int, default 0): Batches of a step of the decay; 0: no decay.
        cycle_momentum (bool, default True): Change the momentum, too.
        cycle_min_mom (PerGroup, default 0.8): The least momentum.
        cycle_max_mom (PerGroup, default 0.9): The greatest.
        decay_mom_rate (float, default 0.0): Of its decay after the cycle.
        last_batch_iteration (int, default -1): Batch before the first, to resume.

    Source: as LRRangeTest.

    Example:
        >>> import torch
        >>> from ctrainer.deepspeed_schedules import OneCycle
        >>> optimizer = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
        >>> schedule = OneCycle(optimizer, cycle_min_lr=0.001, cycle_max_lr=0.01)
        >>> schedule.step()
    """

    _name = "OneCycle"
    _BETA2 = 0.99
    _CYCLE = (
        "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
        "cycle_second_stair_count", "decay_step_size",
    )  # fmt: skip
    _OF_LR = ("cycle_min_lr", "cycle_max_lr", "decay_lr_rate")
    _OF_MOMENTUM = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")

    @_knows_its_options
    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        of, options = _unwrapped(optimizer), _given(locals())
        momenta = {n: options[n] for n in (*self._CYCLE, *self._OF_MOMENTUM)}
        lrs = {n: options[n] for n in (*self._CYCLE, *self._OF_LR)}
        self._momenta = _schedules("OneCycle.momentum", momenta, of)
        self.cycle_momentum = cycle_momentum and _has_betas(of)
        super().__init__(of, last_batch_iteration, **lrs)
        if self.cycle_momentum and last_batch_iteration == -1:
            least = _each("cycle_min_mom", cycle_min_mom, len(of.param_groups))
            self._write_momenta([(momentum, self._BETA2) for momentum in least])

    def _write_momenta(self, momenta: list[tuple[float, float]]) -> None:
        for group, betas in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = betas

    def _go_to(self, batch: int) -> None:
        super()._go_to(batch)
        if self.cycle_momentum:
            self._write_momenta(self.get_mom() or [])

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return each group's betas at last_batch_iteration; None where they stay."""
        if not self.cycle_momentum:
            return None
        at = self.last_batch_iteration
        return [(momentum(at), self._BETA2) for momentum in self._momenta]


def _has_betas(optimizer: Any) -> bool:
    found = "betas" in optimizer.defaults
    if not found:
        logger.warning(
            "cycle_momentum is off: %s has no betas", type(optimizer).__name__
        )
    return found


class WarmupLR(_AfterWarmup):
    """A learning rate that rises from warmup_min_lr to warmup_max_lr and stays there.

    Args:
        optimizer: Has param_groups with "lr".
        warmup_min_lr (PerGroup, default 0.0): Where it begins, for all groups or each.
        warmup_max_lr (PerGroup | None, default None): Where it ends; None: each group's
            own.
        warmup_num_steps (int, default 1000): Batches of the rise, at least 2.
        warmup_type (str, default 'log'): "log" or "linear".
        last_batch_iteration (int, default -1): Batch before the first, to resume.

    Example:
        >>> import torch
        >>> from ctrainer.deepspeed_schedules import WarmupLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
        >>> schedule = WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")
        >>> schedule.step()
    """

    _name = "WarmupLR"

    @_knows_its_options
    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = _own_lrs(optimizer)
        super().__init__(**_given(locals()))


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a linear fall to warmup_min_lr at batch total_num_steps.

    Args:
        optimizer: Has param_groups with "lr".
        total_num_steps (int): Batches of the run.
        warmup_min_lr (PerGroup, default 0.0): Where it begins and ends.
        warmup_max_lr (PerGroup | None, default 0.001): The greatest; None: each group's
            own.
        warmup_num_steps (int, default 1000): Batches of the rise, at least 2.
        warmup_type (str, default 'log'): "log" or "linear".
        last_batch_iteration (int, default -1): Batch before the first, to resume.
    """

    _name = "WarmupDecayLR"

    @_knows_its_options
    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = _own_lrs(optimizer)
        self.total_num_steps = total_num_steps
        _Scheduler.__init__(self, **_given(locals()))
        _warn_of_length(total_num_steps, warmup_num_steps)


class WarmupCosineLR(_AfterWarmup):
    """Parts of the groups' own learning rates: a warm-up, then a cosine down to
    cos_min_ratio.

    The learning rate is 0 until the first step, as in DeepSpeed.

    Args:
        optimizer: Has param_groups with "lr".
        total_num_steps (int): Batches of the run.
        warmup_min_ratio (float, default 0.0): Where it begins.
        warmup_num_steps (int, default 1000): Batches of the rise, at least 2.
        cos_min_ratio (float, default 0.0001): Where it ends.
        warmup_type (str, default 'log'): "log" or "linear".
        last_batch_iteration (int, default -1): Batch before the first, to resume.

    Example:
        >>> import torch
        >>> from ctrainer.deepspeed_schedules import WarmupCosineLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
        >>> schedule = WarmupCosineLR(optimizer, total_num_steps=2000)
        >>> schedule.step()
    """

    _name = "WarmupCosineLR"

    @_knows_its_options
    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(lr=_own_lrs(optimizer), **_given(locals()))
        _warn_of_length(total_num_steps, warmup_num_steps)


def _warn_of_length(total: int, warmup: int) -> None:
    if total < warmup:
        logger.warning("total_num_steps, %s, is less than warmup_num_steps, %s", total,
                       warmup)  # fmt: skip


SCHEDULES = {
    cls.__name__: cls
    for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def from_config(section: Mapping[str, Any], optimizer: Any) -> Any:
    """The schedule of a DeepSpeed configuration's section scheduler.

    Args:
        section (Mapping[str, Any]): Has type, one of SCHEDULES, and params.
        optimizer: Has param_groups with "lr".

    Raises:
        ValueError: another type, or parameters that the schedule does not take.
    """
    name = section.get("type")
    if name not in SCHEDULES:
        raise ValueError(
            f"DeepSpeed does not recognize LR scheduler {name}: scheduler.type may be "
            f"{', '.join(SCHEDULES)}; leave the section out, and set lr_scheduler_type"
        )
    try:
        return SCHEDULES[name](optimizer, **section.get("params") or {})
    except TypeError as error:  # one that is missing, or not a number
        raise ValueError(f"deepspeed: scheduler.params: {error}") from None
