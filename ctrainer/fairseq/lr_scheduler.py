"""fairseq's ten learning-rate schedules: its classes and interface, formulas in C.

A config is a group of ctrainer.fairseq.config.schedules or any object with the
attributes of one, of which those that are missing keep fairseq's defaults; it is read
once and never written to.
An optimizer is a FairseqOptimizer or anything with its get_lr() and set_lr(lr).

Learning rates are the original's at every update. docs/reference/schedules.md lists the
differences.
Source: fairseq 0.12, fairseq/optim/lr_scheduler.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, ClassVar

from ctrainer._C import Schedule
from ctrainer.fairseq.config import default_options
from ctrainer.fairseq.config.schedules import SCHEDULES as _CONFIGS
from ctrainer.schedules import get_scheduler

# The base of fairseq's learning-rate schedules.

SCHEDULES: dict[str, type[FairseqLRScheduler]] = {}  # by the name of --lr-scheduler


def _setting(cfg: Any, name: str, default: Any) -> Any:
    """The option of cfg; the default where it is missing or refers to another one."""
    value = getattr(cfg, name, default)
    return default if isinstance(value, str) and value.startswith("${") else value


class FairseqLRScheduler:
    """The base of the schedules: the best validation loss, and hooks that change
    nothing. `class Own(FairseqLRScheduler, name="inverse_sqrt")` has the options of
    the schedule of that name and is built for it.

    Args:
        cfg (object): The schedule's options; those that are missing have
            fairseq's defaults.
        optimizer: Has get_lr() and set_lr().
        maximize (bool | None, default None): A greater val_loss is better; None: the
            config's maximize_best_checkpoint_metric, where it has that. (fairseq's base
            class keeps the least in any case.)
        **options (bool): maximize.

    Args of every method:
        epoch (int): Counted from 1.
        num_updates (int): Updates done.
        val_loss (float | None): Of the epoch's validation.
        state_dict (dict): What state_dict() of this class or of fairseq's returned.
        total_num_update (int): The schedule's new end, in updates.

    Returns of every method:
        The learning rate, or what the name says.

    Raises:
        ValueError: the optimizer lacks a method, or an option is out of range.

    Example:
        >>> from argparse import Namespace
        >>> from ctrainer.fairseq import build_lr_scheduler
        >>> class Optimizer:
        ...     lr = 0.0
        ...     def get_lr(self):
        ...         return self.lr
        ...     def set_lr(self, lr):
        ...         self.lr = lr
        >>> cfg = Namespace(lr=[0.1], warmup_updates=10, warmup_init_lr=0.0)
        >>> schedule = build_lr_scheduler("inverse_sqrt", cfg, Optimizer())
        >>> schedule.step_update(5)
        0.05
    """

    _name: ClassVar[str] = "pass_through"

    def __init_subclass__(cls, name: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name is not None:
            cls._name = name
            SCHEDULES[name] = cls

    def __init__(
        self, cfg: Any, optimizer: Any, *, maximize: bool | None = None
    ) -> None:
        for needed in ("get_lr", "set_lr"):
            if not callable(getattr(optimizer, needed, None)):
                raise ValueError(
                    f"optimizer must be a FairseqOptimizer; {type(optimizer).__name__} "
                    f"has no {needed}()"
                )
        if maximize is None:
            maximize = bool(getattr(cfg, "maximize_best_checkpoint_metric", False))
        self.cfg = cfg
        self.optimizer = optimizer
        self.best: float | None = None
        self._better = max if maximize else min
        self._settings: dict[str, Any] = {
            name: _setting(cfg, name, default)
            for name, default in default_options(_CONFIGS[self._name]).items()
        }

    def _made(self, *names: str, **more: Any) -> Schedule:
        """C's schedule, of the settings of those names and of more. fairseq's way to
        leave warmup_init_lr out is a number below 0."""
        options = {**{name: self._settings[name] for name in names}, **more}
        if (options.get("warmup_init_lr") or 0) < 0:
            options["warmup_init_lr"] = None
        return Schedule(f"fairseq.{self._name}", options)

    def _lrs(self) -> list[float]:
        lr = self._settings["lr"]
        lrs = [float(lr)] if isinstance(lr, (int, float)) else [float(x) for x in lr]
        if not lrs:
            raise ValueError("lr is empty; expected a number, or one for each epoch")
        return lrs

    def _lr(self) -> float:
        lrs = self._lrs()
        if len(lrs) > 1:
            raise ValueError(
                f"lr has {len(lrs)} numbers, and {type(self).__name__} takes one; use "
                "the schedule 'fixed' for one for each epoch"
            )
        return lrs[0]

    def get_lr(self) -> Any:
        """Return the learning rate in force, the optimizer's."""
        return self.optimizer.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, under fairseq's keys."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what state_dict() of this class or of fairseq's returned.

        Args:
            state_dict (Mapping[str, Any]): With the best loss.
        """
        self.best = state_dict["best"]

    def step_begin_epoch(self, epoch: int) -> Any:
        """Set the learning rate of an epoch before its first update, and return it.

        Args:
            epoch (int): Counted from 1.
        """

    def step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Take in an epoch's end; return the learning rate where the schedule sets one.

        Args:
            epoch (int): Counted from 1.
            val_loss (float | None, default None): Of the epoch's validation.
        """
        if val_loss is not None:
            known = val_loss if self.best is None else self.best
            self.best = self._better(known, val_loss)

    def step_update(self, num_updates: int) -> Any:
        """Set the learning rate after some updates and return it.

        Args:
            num_updates (int): Updates done.
        """
        return self.optimizer.get_lr()

    def reinit(self, total_num_update: int, num_updates: int) -> None:
        """Continue towards another number of updates, where the schedule has one.

        Args:
            total_num_update (int): The new number.
            num_updates (int): Updates done.
        """


# fairseq's schedules whose learning rate the number of updates alone decides.


class OfUpdates(FairseqLRScheduler):
    """A learning rate that the number of updates alone decides."""

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        self._schedule = self._made(**self._options())
        self.lr = self._schedule(0)
        self.optimizer.set_lr(self.lr)

    def _options(self) -> dict[str, Any]:
        return {**self._settings, "lr": self._lr()}

    def step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Note the loss; return the learning rate, which it does not change.

        Args:
            epoch (int): Counted from 1.
            val_loss (float | None, default None): Of the epoch's validation.
        """
        super().step(epoch, val_loss)
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> Any:
        self.lr = self._schedule(num_updates)
        self.optimizer.set_lr(self.lr)
        return self.lr


class InverseSquareRootSchedule(OfUpdates, name="inverse_sqrt"):
    """Linear warm-up, then lr times the square root of warmup_updates / num_updates.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 5.3.
    """


class CosineLRSchedule(OfUpdates, name="cosine"):
    """Linear warm-up, then cosines from lr to min_lr whose lengths grow by t_mult.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        period = options["lr_period_updates"]
        options["lr_period_updates"] = period if period > 0 else None
        return options


class TriStageLRSchedule(OfUpdates, name="tri_stage"):
    """Linear warm-up, a plateau, and an exponential decay to final_lr_scale.

    Source: Park et al., "SpecAugment", 2019.
    """

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        shares = options.pop("phase_ratio")
        if shares is not None:
            named = {f"phase_ratio[{i}]": share for i, share in enumerate(shares)}
            options.update(named)
        return options


class TriangularLRSchedule(OfUpdates, name="triangular"):
    """Triangles between lr and max_lr, which shrinks from cycle to cycle.

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017.
    """


class StepLRSchedule(OfUpdates, name="step"):
    """Linear warm-up, then lr_decay times lr each lr_deacy_period updates."""


# fairseq's schedules that epochs, losses or the optimizer have a say in.


class OfEpochs(FairseqLRScheduler):
    """A schedule whose state is the learning rate that its epoch began with."""

    lr: float

    def _set_base(self, lr: float) -> None:
        self.lr = lr

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch's learning rate."""
        return {"lr": self.lr}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load an epoch's learning rate.

        Args:
            state_dict (Mapping[str, Any]): With "lr".
        """
        if "lr" in state_dict:
            self._set_base(state_dict["lr"])


class FixedLRSchedule(OfEpochs, name="fixed"):
    """A learning rate for each epoch, with a linear warm-up."""

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        self._updates = 0
        self._set_base(self._lrs()[0])

    def _set_base(self, lr: float) -> None:
        self._schedule = self._made("warmup_updates", lr=lr)
        self.lr = lr

    def get_next_lr(self, epoch: int) -> float:
        """Return the learning rate of an epoch.

        Args:
            epoch (int): Counted from 1.
        """
        lrs, forced = self._lrs(), self._settings["force_anneal"]
        if forced is None or epoch < forced:
            return lrs[min(epoch, len(lrs)) - 1]
        return self._made("lr_shrink", lr=lrs[-1], anneals=epoch + 1 - forced)(0)

    def step_begin_epoch(self, epoch: int) -> Any:
        self._set_base(self.get_next_lr(epoch))
        return self.step_update(self._updates)

    def step_update(self, num_updates: int) -> Any:
        self._updates = num_updates
        self.optimizer.set_lr(self._schedule(num_updates))
        return self.optimizer.get_lr()


class PolynomialDecayLRSchedule(FairseqLRScheduler, name="polynomial_decay"):
    """Linear warm-up, then a polynomial down to end_learning_rate.

    Of several numbers in lr, epoch e begins with number e, counted from 0, as in
    fairseq.
    """

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        self.total_num_update = self._settings["total_num_update"]
        warmup = self._settings["warmup_updates"]
        self.warmup_factor = 1.0 / warmup if warmup > 0 else 1.0
        self._set_base(self._lrs()[0])
        self.optimizer.set_lr(self.warmup_factor * self.lr)

    def _set_base(self, lr: float) -> None:
        names = ("warmup_updates", "end_learning_rate", "power")
        total = self.total_num_update
        self._schedule = self._made(*names, lr=lr, total_num_update=total)
        self.lr = lr

    def get_next_lr(self, epoch: int) -> Any:
        """Return the learning rate that an epoch begins with; annealing, that of now.

        Args:
            epoch (int): Counted from 1.
        """
        lrs, forced = self._lrs(), self._settings["force_anneal"]
        if forced is None or epoch < forced:
            return lrs[min(epoch, len(lrs) - 1)]
        return self.optimizer.get_lr()

    def step_begin_epoch(self, epoch: int) -> Any:
        self._set_base(self.get_next_lr(epoch))
        self.optimizer.set_lr(self.warmup_factor * self.lr)
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> Any:
        warmup = self._settings["warmup_updates"]
        if warmup > 0:
            self.warmup_factor = min(num_updates / warmup, 1.0)
        self.optimizer.set_lr(self._schedule(num_updates))
        return self.optimizer.get_lr()

    def reinit(self, total_num_update: int, num_updates: int) -> None:
        """Decay towards another total_num_update; only where there is a warm-up.

        Args:
            total_num_update (int): The new number.
            num_updates (int): Updates done.
        """
        if self._settings["warmup_updates"] > 0:
            self.total_num_update = total_num_update
            self._set_base(self.lr)
            self.step_update(num_updates)


class ReduceLROnPlateauLRSchedule(FairseqLRScheduler, name="reduce_lr_on_plateau"):
    """Linear warm-up, then lr_shrink times the learning rate when the loss stops
    improving.

    num_bad_epochs is saved, so that patience continues after a resume; fairseq, which
    forgets it, ignores the key.
    """

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        s = self._settings
        self._warmup_updates: int = s["warmup_updates"]
        options = {
            "mode": "max" if self._better is max else "min",
            "factor": s["lr_shrink"],
            "patience": s["lr_patience"],
            "threshold": s["lr_threshold"],
        }
        self.lr_scheduler = get_scheduler(
            "reduce_lr_on_plateau",
            getattr(optimizer, "optimizer", optimizer),
            scheduler_specific_kwargs=options,
        )
        names = ("warmup_updates", "warmup_init_lr")
        self._warmup = self._made(*names, lr=self._lr())
        self.warmup_end = self._warmup_updates <= 0
        self.lr = self._warmup(0)
        self.optimizer.set_lr(self.lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss, the last epoch and the bad ones since the best."""
        names = ("best", "last_epoch", "num_bad_epochs")
        return {name: getattr(self.lr_scheduler, name) for name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state.

        Args:
            state_dict (Mapping[str, Any]): Of fairseq's, which has no num_bad_epochs,
                with 0 of them.
        """
        state = {"num_bad_epochs": 0, **state_dict}
        self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **state})

    def step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Take in an epoch's loss, once the warm-up is over, and return the learning
        rate.

        Args:
            epoch (int): Counted from 1.
            val_loss (float | None, default None): Of the epoch's validation.
        """
        super().step(epoch, val_loss)
        if val_loss is not None and self.warmup_end:
            self.lr_scheduler.step(val_loss)
        else:
            self.lr_scheduler.last_epoch = epoch
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> Any:
        """Set the learning rate of the warm-up, and return it; after it, leave it to
        step().

        Args:
            num_updates (int): Updates done.
        """
        if 0 < self._warmup_updates < num_updates:
            self.warmup_end = True
        elif self._warmup_updates > 0:
            self.lr = self._warmup(num_updates)
            self.optimizer.set_lr(self.lr)
        return self.optimizer.get_lr()


class ManualSchedule(OfEpochs, name="manual"):
    """Learning rates from given epochs and updates on; an update's comes first."""

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        self.epoch2lr = self._table("epoch2lr")
        self.update2lr = self._table("update2lr")
        first = self.update2lr.get(1, self._lrs()[0])
        self.lr = self.epoch2lr.get(1, first)
        self.optimizer.set_lr(self.lr)

    def _table(self, name: str) -> dict[int, float]:
        """The learning rate at each number where it changes, in their order."""
        text = self._settings[name]
        try:
            return dict(sorted(_changes(ast.literal_eval(text)).items()))
        except (ValueError, TypeError, SyntaxError, AttributeError) as error:
            raise ValueError(
                f"{name} is {text!r}; expected a dict literal from numbers, 'a,b' or "
                f"'a-b', to learning rates ({error})"
            ) from None

    def _at(self, table: dict[int, float], now: int) -> Any:
        """The learning rate of the last number up to now, else the optimizer's."""
        past = bisect_right(list(table), now)
        return list(table.values())[past - 1] if past else self.optimizer.get_lr()

    def get_next_lr(self, epoch: int) -> Any:
        """Return the learning rate of an epoch.

        Args:
            epoch (int): Counted from 1.
        """
        return self._at(self.epoch2lr, epoch)

    def step_begin_epoch(self, epoch: int) -> Any:
        self.lr = self.get_next_lr(epoch)
        self.optimizer.set_lr(self.lr)
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> Any:
        self.optimizer.set_lr(self._at(self.update2lr, num_updates))
        return self.optimizer.get_lr()


def _changes(table: Any) -> dict[int, float]:
    """Learning rates by the numbers in keys "3", "3,5" or "3-5"; later keys win."""
    made = {}
    for key, lr in table.items():
        for part in str(key).split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            made.update(dict.fromkeys(numbers, float(lr)))
    return made


class PassThroughScheduleSchedule(FairseqLRScheduler, name="pass_through"):
    """Passes everything on to the optimizer's own lr_scheduler.

    (fairseq does not pass step() on, so that losses do not reach schedules in it.)

    Raises:
        ValueError: the optimizer has no lr_scheduler.
    """

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        if getattr(optimizer, "lr_scheduler", None) is None:
            raise ValueError(
                "pass_through needs an optimizer with a schedule of its own; "
                f"{type(optimizer).__name__} has no lr_scheduler"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the inner schedule's state."""
        made: dict[str, Any] = self.optimizer.lr_scheduler.state_dict()
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the inner schedule's state.

        Args:
            state_dict (Mapping[str, Any]): Of the inner schedule.
        """
        self.optimizer.lr_scheduler.load_state_dict(state_dict)

    def step_begin_epoch(self, epoch: int) -> Any:
        return self.optimizer.lr_scheduler.step_begin_epoch(epoch)

    def step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Note the loss and pass it on; return what the inner schedule returns.

        Args:
            epoch (int): Counted from 1.
            val_loss (float | None, default None): Of the epoch's validation.
        """
        super().step(epoch, val_loss)
        return self.optimizer.lr_scheduler.step(epoch, val_loss)

    def step_update(self, num_updates: int) -> Any:
        return self.optimizer.lr_scheduler.step_update(num_updates)


__all__ = [
    "SCHEDULES",
    "CosineLRSchedule",
    "FairseqLRScheduler",
    "FixedLRSchedule",
    "InverseSquareRootSchedule",
    "ManualSchedule",
    "PassThroughScheduleSchedule",
    "PolynomialDecayLRSchedule",
    "ReduceLROnPlateauLRSchedule",
    "StepLRSchedule",
    "TriStageLRSchedule",
    "TriangularLRSchedule",
    "build_lr_scheduler",
]


def build_lr_scheduler(
    name: str, cfg: Any, optimizer: Any, *, maximize: bool | None = None
) -> FairseqLRScheduler:
    """Return the schedule of that name, as --lr-scheduler does.

    Args:
        name (str): "inverse_sqrt" and so on.
        cfg (object): Its options.
        optimizer: Has get_lr() and set_lr().
        maximize (bool | None, default None): A greater val_loss is better; None: as the
            config says.

    Raises:
        ValueError: there is none of that name, or a setting is out of range; the
            message names it.

    Example:
        >>> from argparse import Namespace
        >>> from ctrainer.fairseq import build_lr_scheduler
        >>> class Optimizer:
        ...     lr = 0.0
        ...     def get_lr(self):
        ...         return self.lr
        ...     def set_lr(self, lr):
        ...         self.lr = lr
        >>> cfg = Namespace(lr=[0.1, 0.05])
        >>> schedule = build_lr_scheduler("fixed", cfg, Optimizer())
        >>> schedule.step_begin_epoch(2)
        0.05
    """
    if name not in SCHEDULES:
        raise ValueError(f"lr_scheduler is {name!r}; expected one of {list(SCHEDULES)}")
    return SCHEDULES[name](cfg, optimizer, maximize=maximize)
