"""fairseq's schedules whose rate the number of updates alone decides."""

from __future__ import annotations

from typing import Any, ClassVar

from ctrainer._C import Schedule
from ctrainer.fairseq._lr_base import FairseqLRScheduler, unless_negative
from ctrainer.fairseq.config import schedules


class OfUpdates(FairseqLRScheduler):
    """A rate that the number of updates alone decides."""

    _name: ClassVar[str]

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        super().__init__(cfg, optimizer, **options)
        self._schedule = Schedule(f"fairseq.{self._name}", self._options())
        self.lr = self._schedule(0)
        self.optimizer.set_lr(self.lr)

    def _options(self) -> dict[str, Any]:
        options = {**self._settings, "lr": self._rate()}
        if "warmup_init_lr" in options:
            options["warmup_init_lr"] = unless_negative(options["warmup_init_lr"])
        return options

    def step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Note the loss; return the rate, which it does not change."""
        super().step(epoch, val_loss)
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> Any:
        self.lr = self._schedule(num_updates)
        self.optimizer.set_lr(self.lr)
        return self.lr


class InverseSquareRootSchedule(OfUpdates):
    """Linear warm-up, then lr times the square root of warmup_updates / num_updates.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 5.3.
    """

    _name = "inverse_sqrt"
    _config = schedules.InverseSquareRootLRScheduleConfig


class CosineLRSchedule(OfUpdates):
    """Linear warm-up, then cosines from lr to min_lr whose lengths grow by t_mult.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    _name = "cosine"
    _config = schedules.CosineLRScheduleConfig

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        period = options["lr_period_updates"]
        options["lr_period_updates"] = period if period > 0 else None
        return options


class TriStageLRSchedule(OfUpdates):
    """Linear warm-up, a plateau, and an exponential decay to final_lr_scale.

    Source: Park et al., "SpecAugment", 2019.
    """

    _name = "tri_stage"
    _config = schedules.TriStageLRScheduleConfig

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        shares = options.pop("phase_ratio")
        if shares is not None:
            named = {f"phase_ratio[{i}]": share for i, share in enumerate(shares)}
            options.update(named)
        return options


class TriangularLRSchedule(OfUpdates):
    """Triangles between lr and max_lr, which shrinks from cycle to cycle.

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017.
    """

    _name = "triangular"
    _config = schedules.TriangularLRScheduleConfig


class StepLRSchedule(OfUpdates):
    """Linear warm-up, then lr_decay times the rate each lr_deacy_period updates."""

    _name = "step"
    _config = schedules.StepLRScheduleConfig
