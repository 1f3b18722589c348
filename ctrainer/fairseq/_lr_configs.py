"""Configurations of fairseq's learning-rate schedules: its names, order and defaults.

lr, max_update and maximize_best_checkpoint_metric are fairseq's `optimization` and
`checkpoint` settings, whose defaults are repeated here. Source: fairseq 0.12.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def _lr() -> list[float]:
    return [0.25]


@dataclass
class FixedLRScheduleConfig:
    """A rate for each epoch, lr_shrink times the last from epoch force_anneal on."""

    force_anneal: int | None = None
    lr_shrink: float = 0.1
    warmup_updates: int = 0
    lr: list[float] = field(default_factory=_lr)


@dataclass
class InverseSquareRootLRScheduleConfig:
    """Below 0, warmup_init_lr is 0."""

    warmup_updates: int = 4000
    warmup_init_lr: float = -1
    lr: list[float] = field(default_factory=_lr)


@dataclass
class CosineLRScheduleConfig:
    """warmup_init_lr below 0 is min_lr; lr_period_updates then is what is left."""

    warmup_updates: int = 0
    warmup_init_lr: float = -1
    lr: list[float] = field(default_factory=_lr)
    min_lr: float = 0.0
    t_mult: float = 1.0
    lr_period_updates: float = -1
    lr_shrink: float = 0.1
    max_update: int = 0


@dataclass
class PolynomialDecayLRScheduleConfig:
    """total_num_update is needed."""

    warmup_updates: int = 0
    force_anneal: int | None = None
    end_learning_rate: float = 0.0
    power: float = 1.0
    total_num_update: float = 0
    lr: list[float] = field(default_factory=_lr)


@dataclass
class ReduceLROnPlateauLRScheduleConfig:
    """Below 0, warmup_init_lr is 0."""

    lr_shrink: float = 0.1
    lr_threshold: float = 1e-4
    lr_patience: int = 0
    warmup_updates: int = 0
    warmup_init_lr: float = -1
    lr: list[float] = field(default_factory=_lr)
    maximize_best_checkpoint_metric: bool = False


@dataclass
class TriStageLRScheduleConfig:
    """Steps, or the shares of max_update that are theirs."""

    warmup_steps: int = 0
    hold_steps: int = 0
    decay_steps: int = 0
    phase_ratio: tuple[float, float, float] | None = None
    init_lr_scale: float = 0.01
    final_lr_scale: float = 0.01
    max_update: float = 0
    lr: list[float] = field(default_factory=_lr)


@dataclass
class TriangularLRScheduleConfig:
    """max_lr is needed; lr is the least rate."""

    max_lr: float | None = None
    lr_period_updates: float = 5000
    lr_shrink: float = 0.1
    shrink_min: bool = False
    lr: list[float] = field(default_factory=_lr)


@dataclass
class StepLRScheduleConfig:
    """lr_deacy_period is fairseq's spelling. warmup_init_lr below 0 is min_lr."""

    warmup_updates: int = 0
    warmup_init_lr: float = -1
    lr: list[float] = field(default_factory=_lr)
    min_lr: float = 0.0
    lr_deacy_period: int = 25000
    lr_decay: float = 0.5


@dataclass
class ManualScheduleConfig:
    """Dict literals from an epoch or update, "a,b" or "a-b", to the rate from it on."""

    epoch2lr: str = "{}"
    update2lr: str = "{}"
    lr: list[float] = field(default_factory=_lr)


@dataclass
class PassThroughScheduleConfig:
    """Nothing to set."""
