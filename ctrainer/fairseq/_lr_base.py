"""What fairseq's learning-rate schedules share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ctrainer.fairseq.config import default_options, schedules


def unless_negative(value: Any) -> Any:
    """fairseq's way to leave a number out is to give one below 0."""
    return None if value is None or value < 0 else value


def _setting(cfg: Any, name: str, default: Any) -> Any:
    """What cfg says; default where it says nothing or refers to another option."""
    value = getattr(cfg, name, default)
    return default if isinstance(value, str) and value.startswith("${") else value


class FairseqLRScheduler:
    """What all have: the best validation loss, and hooks that change nothing.

    maximize says that a greater val_loss is better; by default the config's
    maximize_best_checkpoint_metric does, where it has that. (fairseq's base class keeps
    the least in any case.)
    """

    _config: ClassVar[type[Any]] = schedules.PassThroughScheduleConfig

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
            for name, default in default_options(self._config).items()
        }

    def _rates(self) -> list[float]:
        lr = self._settings["lr"]
        rates = [float(lr)] if isinstance(lr, (int, float)) else [float(x) for x in lr]
        if not rates:
            raise ValueError("lr is empty; expected a rate, or one for each epoch")
        return rates

    def _rate(self) -> float:
        rates = self._rates()
        if len(rates) > 1:
            raise ValueError(
                f"lr has {len(rates)} rates, and {type(self).__name__} takes one; use "
                "the schedule 'fixed' for one for each epoch"
            )
        return rates[0]

    def get_lr(self) -> Any:
        """Return the rate in force, the optimizer's."""
        return self.optimizer.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, under fairseq's keys."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what state_dict() of this class or of fairseq's gave."""
        self.best = state_dict["best"]

    def step_begin_epoch(self, epoch: int) -> Any:
        """Set the rate of an epoch, counted from 1, before its first update."""

    def step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Take in an epoch's end; return the rate where the schedule sets one."""
        if val_loss is not None:
            known = val_loss if self.best is None else self.best
            self.best = self._better(known, val_loss)

    def step_update(self, num_updates: int) -> Any:
        """Set the rate after num_updates updates and return it."""
        return self.optimizer.get_lr()

    def reinit(self, total_num_update: int, num_updates: int) -> None:
        """Go on towards another number of updates, where the schedule has one."""
