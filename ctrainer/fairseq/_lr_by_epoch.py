"""fairseq's schedules that epochs, losses or the optimizer have a say in."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from ctrainer._C import Schedule
from ctrainer.fairseq._lr_base import FairseqLRScheduler, unless_negative
from ctrainer.fairseq.config import schedules
from ctrainer.schedules import get_scheduler


class FixedLRSchedule(FairseqLRScheduler):
    """A rate for each epoch, with a linear warm-up."""

    _config = schedules.FixedLRScheduleConfig

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        self._updates = 0
        self._set_base(self._rates()[0])

    def _set_base(self, lr: float) -> None:
        warmup = self._settings["warmup_updates"]
        self._schedule = Schedule("fairseq.fixed", {"lr": lr, "warmup_updates": warmup})
        self.lr = lr

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch's rate."""
        return {"lr": self.lr}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load an epoch's rate."""
        if "lr" in state_dict:
            self._set_base(state_dict["lr"])

    def get_next_lr(self, epoch: int) -> float:
        """Return the rate of an epoch, counted from 1."""
        rates, forced = self._rates(), self._settings["force_anneal"]
        if forced is None or epoch < forced:
            return rates[min(epoch, len(rates)) - 1]
        anneal = {
            "lr_shrink": self._settings["lr_shrink"],
            "anneals": epoch + 1 - forced,
        }
        return Schedule("fairseq.fixed", {"lr": rates[-1], **anneal})(0)

    def step_begin_epoch(self, epoch: int) -> Any:
        self._set_base(self.get_next_lr(epoch))
        return self.step_update(self._updates)

    def step_update(self, num_updates: int) -> Any:
        self._updates = num_updates
        self.optimizer.set_lr(self._schedule(num_updates))
        return self.optimizer.get_lr()


class PolynomialDecayLRSchedule(FairseqLRScheduler):
    """Linear warm-up, then a polynomial down to end_learning_rate.

    Of several rates in lr, epoch e begins with number e, counted from 0, as in fairseq.
    """

    _config = schedules.PolynomialDecayLRScheduleConfig

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        self.total_num_update = self._settings["total_num_update"]
        warmup = self._settings["warmup_updates"]
        self.warmup_factor = 1.0 / warmup if warmup > 0 else 1.0
        self._set_base(self._rates()[0])
        self.optimizer.set_lr(self.warmup_factor * self.lr)

    def _set_base(self, lr: float) -> None:
        names = ("warmup_updates", "end_learning_rate", "power")
        options = {name: self._settings[name] for name in names}
        options.update(lr=lr, total_num_update=self.total_num_update)
        self._schedule = Schedule("fairseq.polynomial_decay", options)
        self.lr = lr

    def get_next_lr(self, epoch: int) -> Any:
        """Return the rate that an epoch begins with; annealing, that of now."""
        rates, forced = self._rates(), self._settings["force_anneal"]
        if forced is None or epoch < forced:
            return rates[min(epoch, len(rates) - 1)]
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
        """Decay towards another total_num_update; only where there is a warm-up."""
        if self._settings["warmup_updates"] > 0:
            self.total_num_update = total_num_update
            self._set_base(self.lr)
            self.step_update(num_updates)


class ReduceLROnPlateauLRSchedule(FairseqLRScheduler):
    """Linear warm-up, then lr_shrink times the rate when the loss stops improving.

    num_bad_epochs is saved, so that patience goes on after a resume; fairseq, which
    forgets it, passes the key over.
    """

    _config = schedules.ReduceLROnPlateauLRScheduleConfig

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
        start = {
            "lr": self._rate(),
            "warmup_updates": self._warmup_updates,
            "warmup_init_lr": unless_negative(s["warmup_init_lr"]),
        }
        self._warmup = Schedule("fairseq.reduce_lr_on_plateau", start)
        self.warmup_end = self._warmup_updates <= 0
        self.lr = self._warmup(0)
        self.optimizer.set_lr(self.lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss, the last epoch and the bad ones since the best."""
        names = ("best", "last_epoch", "num_bad_epochs")
        return {name: getattr(self.lr_scheduler, name) for name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; of fairseq's, which has no num_bad_epochs, with 0 of them."""
        state = {"num_bad_epochs": 0, **state_dict}
        self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **state})

    def step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Take in an epoch's loss, once the warm-up is over, and return the rate."""
        super().step(epoch, val_loss)
        if val_loss is not None and self.warmup_end:
            self.lr_scheduler.step(val_loss)
        else:
            self.lr_scheduler.last_epoch = epoch
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> Any:
        """Set the rate of the warm-up; after it, leave it to step()."""
        if 0 < self._warmup_updates < num_updates:
            self.warmup_end = True
        elif self._warmup_updates > 0:
            self.lr = self._warmup(num_updates)
            self.optimizer.set_lr(self.lr)
        return self.optimizer.get_lr()


class ManualSchedule(FairseqLRScheduler):
    """Rates from given epochs and updates on; an update's replaces an epoch's."""

    _config = schedules.ManualScheduleConfig

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        self.epoch2lr = self._table("epoch2lr")
        self.update2lr = self._table("update2lr")
        first = self.update2lr.get(1, self._rates()[0])
        self.lr: float = self.epoch2lr.get(1, first)
        self.optimizer.set_lr(self.lr)

    def _table(self, name: str) -> dict[int, float]:
        """The rate at each number where it changes, in their order."""
        text = self._settings[name]
        try:
            return dict(sorted(_changes(ast.literal_eval(text)).items()))
        except (ValueError, TypeError, SyntaxError, AttributeError) as error:
            raise ValueError(
                f"{name} is {text!r}; expected a dict literal from numbers, 'a,b' or "
                f"'a-b', to rates ({error})"
            ) from None

    def _at(self, table: dict[int, float], now: int) -> Any:
        """The rate of the last number up to now; that of the optimizer before any."""
        past = bisect_right(list(table), now)
        return list(table.values())[past - 1] if past else self.optimizer.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch's rate."""
        return {"lr": self.lr}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load an epoch's rate."""
        if "lr" in state_dict:
            self.lr = state_dict["lr"]

    def get_next_lr(self, epoch: int) -> Any:
        """Return the rate of an epoch."""
        return self._at(self.epoch2lr, epoch)

    def step_begin_epoch(self, epoch: int) -> Any:
        self.lr = self.get_next_lr(epoch)
        self.optimizer.set_lr(self.lr)
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> Any:
        self.optimizer.set_lr(self._at(self.update2lr, num_updates))
        return self.optimizer.get_lr()


def _changes(table: Any) -> dict[int, float]:
    """The rate of each number that a key "3", "3,5" or "3-5" names; later ones win."""
    made = {}
    for key, rate in table.items():
        for part in str(key).split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            made.update(dict.fromkeys(numbers, float(rate)))
    return made


class PassThroughScheduleSchedule(FairseqLRScheduler):
    """Hands everything on to the optimizer's own lr_scheduler.

    (fairseq does not hand on step(), so that losses do not reach schedules in it.)
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
        """Load the inner schedule's state."""
        self.optimizer.lr_scheduler.load_state_dict(state_dict)

    def step_begin_epoch(self, epoch: int) -> Any:
        return self.optimizer.lr_scheduler.step_begin_epoch(epoch)

    def step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Note the loss and hand it on."""
        super().step(epoch, val_loss)
        return self.optimizer.lr_scheduler.step(epoch, val_loss)

    def step_update(self, num_updates: int) -> Any:
        return self.optimizer.lr_scheduler.step_update(num_updates)
