"""fairseq's ten learning-rate schedules: its classes and interface, formulas in C.

A config is a group of ctrainer.fairseq.config.schedules or any object with the
attributes of one, of which those that are missing keep fairseq's defaults; it is read
once and never written to.
An optimizer is a FairseqOptimizer or anything with its get_lr() and set_lr(lr).

Rates are the original's at every update. What differs is listed in docs/schedules.md.
Source: fairseq 0.12, fairseq/optim/lr_scheduler.
"""

from __future__ import annotations

from typing import Any

from ctrainer.fairseq._lr_base import FairseqLRScheduler
from ctrainer.fairseq._lr_by_epoch import (
    FixedLRSchedule,
    ManualSchedule,
    PassThroughScheduleSchedule,
    PolynomialDecayLRSchedule,
    ReduceLROnPlateauLRSchedule,
)
from ctrainer.fairseq._lr_by_update import (
    CosineLRSchedule,
    InverseSquareRootSchedule,
    StepLRSchedule,
    TriangularLRSchedule,
    TriStageLRSchedule,
)

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


SCHEDULES: dict[str, type[FairseqLRScheduler]] = {
    "fixed": FixedLRSchedule,
    "inverse_sqrt": InverseSquareRootSchedule,
    "cosine": CosineLRSchedule,
    "polynomial_decay": PolynomialDecayLRSchedule,
    "reduce_lr_on_plateau": ReduceLROnPlateauLRSchedule,
    "tri_stage": TriStageLRSchedule,
    "triangular": TriangularLRSchedule,
    "step": StepLRSchedule,
    "manual": ManualSchedule,
    "pass_through": PassThroughScheduleSchedule,
}


def build_lr_scheduler(
    name: str, cfg: Any, optimizer: Any, *, maximize: bool | None = None
) -> FairseqLRScheduler:
    """Return the schedule called name, as --lr-scheduler does.

    Raises:
        ValueError: there is none of that name, or a setting is out of range; the
            message names it.
    """
    if name not in SCHEDULES:
        raise ValueError(f"lr_scheduler is {name!r}; expected one of {list(SCHEDULES)}")
    return SCHEDULES[name](cfg, optimizer, maximize=maximize)
