"""The groups of the learning-rate schedules, `lr_scheduler`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ctrainer.arguments.settings import (
    Count,
    Fraction,
    Natural,
    NotNegative,
    Portion,
    Positive,
    Range,
)
from ctrainer.fairseq.config.base import (
    II,
    MISSING,
    FairseqDataclass,
    LearningRates,
    opt,
)

RateOrOwn = Annotated[float, Range("[-1, inf)")]

_WARMUP = "Updates over which the learning rate rises."
_FIRST = "Learning rate at the start of the warm-up; -1: the schedule's own."
_SHRINK = "Factor by which learning rates are lowered."
_LEAST = "Least learning rate."


@dataclass
class FixedLRScheduleConfig(FairseqDataclass):
    """One learning rate for each epoch."""

    force_anneal: Natural | None = opt(
        None, "Epoch from which the learning rate is lowered."
    )
    lr_shrink: NotNegative = opt(0.1, _SHRINK)
    warmup_updates: Natural = opt(0, _WARMUP)
    lr: LearningRates = II("optimization.lr")


@dataclass
class InverseSquareRootLRScheduleConfig(FairseqDataclass):
    """With the inverse square root of the update."""

    warmup_updates: Natural = opt(4000, _WARMUP)
    warmup_init_lr: RateOrOwn = opt(-1, _FIRST)
    lr: LearningRates = II("optimization.lr")


@dataclass
class CosineLRScheduleConfig(FairseqDataclass):
    """Along a cosine, again and again."""

    warmup_updates: Natural = opt(0, _WARMUP)
    warmup_init_lr: RateOrOwn = opt(-1, _FIRST)
    lr: LearningRates = opt(
        II("optimization.lr"), "Greatest learning rate, above min_lr."
    )
    min_lr: NotNegative = opt(0.0, _LEAST)
    t_mult: Positive = opt(1.0, "Factor from the length of a period to the next.")
    lr_period_updates: Annotated[float, Range("[-1, inf)")] = opt(
        -1, "Updates of the first period; -1: all that follow the warm-up."
    )
    lr_shrink: NotNegative = opt(0.1, _SHRINK)
    max_update: Natural = II("optimization.max_update")


@dataclass
class PolynomialDecayLRScheduleConfig(FairseqDataclass):
    """Along a polynomial to an end."""

    warmup_updates: Natural = opt(0, _WARMUP)
    force_anneal: Natural | None = opt(
        None, "Epoch from which the learning rate is lowered."
    )
    end_learning_rate: NotNegative = opt(0.0, "Learning rate at the end.")
    power: NotNegative = opt(1.0, "Exponent; 1: a straight line.")
    total_num_update: NotNegative = opt(
        II("optimization.max_update"), "Update of the end; by default max_update."
    )
    lr: LearningRates = II("optimization.lr")


@dataclass
class ReduceLROnPlateauLRScheduleConfig(FairseqDataclass):
    """Lowered when validation stops improving."""

    lr_shrink: Fraction = opt(0.1, _SHRINK)
    lr_threshold: NotNegative = opt(1e-4, "Relative improvement that counts.")
    lr_patience: Natural = opt(0, "Epochs without improvement that do not lower it.")
    warmup_updates: Natural = opt(0, _WARMUP)
    warmup_init_lr: RateOrOwn = opt(-1, _FIRST)
    lr: LearningRates = II("optimization.lr")
    maximize_best_checkpoint_metric: bool = II(
        "checkpoint.maximize_best_checkpoint_metric"
    )


@dataclass
class TriStageLRScheduleConfig(FairseqDataclass):
    """Up, level, down."""

    warmup_steps: Natural = opt(0, "Updates on the way up.")
    hold_steps: Natural = opt(0, "Updates on the level.")
    decay_steps: Natural = opt(0, "Updates on the way down.")
    phase_ratio: tuple[Portion, Portion, Portion] | None = opt(
        None, "Fractions of max_update for the three stages, with sum 1."
    )
    init_lr_scale: NotNegative = opt(
        0.01, "Fraction of the learning rate at the start."
    )
    final_lr_scale: Positive = opt(0.01, "Fraction of the learning rate at the end.")
    max_update: NotNegative = II("optimization.max_update")
    lr: LearningRates = II("optimization.lr")


@dataclass
class TriangularLRScheduleConfig(FairseqDataclass):
    """Up and down in a straight line."""

    max_lr: NotNegative = opt(MISSING, "Greatest learning rate, above lr.")
    lr_period_updates: Annotated[float, Range("[2, inf)")] = opt(
        5000, "Updates of a period."
    )
    lr_shrink: NotNegative = opt(0.1, _SHRINK)
    shrink_min: bool = opt(False, "Lower the least learning rate too.")
    lr: LearningRates = II("optimization.lr")


@dataclass
class StepLRScheduleConfig(FairseqDataclass):
    """Lowered every so many updates. lr_deacy_period is fairseq's spelling."""

    warmup_updates: Natural = opt(0, _WARMUP)
    warmup_init_lr: RateOrOwn = opt(-1, _FIRST)
    lr: LearningRates = opt(
        II("optimization.lr"), "Greatest learning rate, above min_lr."
    )
    min_lr: NotNegative = opt(0.0, _LEAST)
    lr_deacy_period: Count = opt(25000, "Updates of a period.")
    lr_decay: Portion = opt(0.5, "Factor from a period to the next.")


@dataclass
class ManualScheduleConfig(FairseqDataclass):
    """Learning rates by epoch or update."""

    epoch2lr: str = opt(
        "{}", "Python dict from epochs, such as '1,3-5', to learning rates."
    )
    update2lr: str = opt("{}", "Python dict from updates to learning rates.")
    lr: LearningRates = II("optimization.lr")


@dataclass
class PassThroughScheduleConfig(FairseqDataclass):
    """The optimizer has its own schedule."""


SCHEDULES: dict[str, type[FairseqDataclass]] = {
    "cosine": CosineLRScheduleConfig,
    "fixed": FixedLRScheduleConfig,
    "inverse_sqrt": InverseSquareRootLRScheduleConfig,
    "manual": ManualScheduleConfig,
    "pass_through": PassThroughScheduleConfig,
    "polynomial_decay": PolynomialDecayLRScheduleConfig,
    "reduce_lr_on_plateau": ReduceLROnPlateauLRScheduleConfig,
    "step": StepLRScheduleConfig,
    "tri_stage": TriStageLRScheduleConfig,
    "triangular": TriangularLRScheduleConfig,
}
