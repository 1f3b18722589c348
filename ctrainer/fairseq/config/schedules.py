"""The groups of the learning-rate schedules, `lr_scheduler`."""

from __future__ import annotations

from dataclasses import dataclass

from ctrainer.fairseq.config.base import II, MISSING, FairseqDataclass, opt

_WARMUP = "Updates over which the rate rises."
_FIRST = "Rate at which it begins to rise; -1: the schedule's own."
_SHRINK = "Factor by which rates are lowered."
_LEAST = "Least rate."


@dataclass
class FixedLRScheduleConfig(FairseqDataclass):
    """A rate an epoch."""

    force_anneal: int | None = opt(None, "Epoch from which the rate is lowered.")
    lr_shrink: float = opt(0.1, _SHRINK)
    warmup_updates: int = opt(0, _WARMUP)
    lr: list[float] = II("optimization.lr")


@dataclass
class InverseSquareRootLRScheduleConfig(FairseqDataclass):
    """With the inverse square root of the update."""

    warmup_updates: int = opt(4000, _WARMUP)
    warmup_init_lr: float = opt(-1, _FIRST)
    lr: list[float] = II("optimization.lr")


@dataclass
class CosineLRScheduleConfig(FairseqDataclass):
    """Along a cosine, again and again."""

    warmup_updates: int = opt(0, _WARMUP)
    warmup_init_lr: float = opt(-1, _FIRST)
    lr: list[float] = opt(II("optimization.lr"), "Greatest rate, above min_lr.")
    min_lr: float = opt(0.0, _LEAST)
    t_mult: float = opt(1.0, "Factor from the length of a period to the next.")
    lr_period_updates: float = opt(
        -1, "Updates of the first period; -1: all that follow the warm-up."
    )
    lr_shrink: float = opt(0.1, _SHRINK)
    max_update: int = II("optimization.max_update")


@dataclass
class PolynomialDecayLRScheduleConfig(FairseqDataclass):
    """Along a polynomial to an end."""

    warmup_updates: int = opt(0, _WARMUP)
    force_anneal: int | None = opt(None, "Epoch from which the rate is lowered.")
    end_learning_rate: float = opt(0.0, "Rate at the end.")
    power: float = opt(1.0, "Exponent; 1: a straight line.")
    total_num_update: float = opt(
        II("optimization.max_update"), "Update of the end; by default max_update."
    )
    lr: list[float] = II("optimization.lr")


@dataclass
class ReduceLROnPlateauLRScheduleConfig(FairseqDataclass):
    """Lowered when validation stops improving."""

    lr_shrink: float = opt(0.1, _SHRINK)
    lr_threshold: float = opt(1e-4, "Relative improvement that counts.")
    lr_patience: int = opt(0, "Epochs without improvement that are borne.")
    warmup_updates: int = opt(0, _WARMUP)
    warmup_init_lr: float = opt(-1, _FIRST)
    lr: list[float] = II("optimization.lr")
    maximize_best_checkpoint_metric: bool = II(
        "checkpoint.maximize_best_checkpoint_metric"
    )


@dataclass
class TriStageLRScheduleConfig(FairseqDataclass):
    """Up, level, down."""

    warmup_steps: int = opt(0, "Updates on the way up.")
    hold_steps: int = opt(0, "Updates on the level.")
    decay_steps: int = opt(0, "Updates on the way down.")
    phase_ratio: tuple[float, float, float] | None = opt(
        None, "Shares of max_update for the three, which add up to 1."
    )
    init_lr_scale: float = opt(0.01, "Share of the rate at the start.")
    final_lr_scale: float = opt(0.01, "Share of the rate at the end.")
    max_update: float = II("optimization.max_update")
    lr: list[float] = II("optimization.lr")


@dataclass
class TriangularLRScheduleConfig(FairseqDataclass):
    """Up and down in a straight line."""

    max_lr: float = opt(MISSING, "Greatest rate, above lr.")
    lr_period_updates: float = opt(5000, "Updates of a period.")
    lr_shrink: float = opt(0.1, _SHRINK)
    shrink_min: bool = opt(False, "Lower the least rate too.")
    lr: list[float] = II("optimization.lr")


@dataclass
class StepLRScheduleConfig(FairseqDataclass):
    """Lowered every so many updates. lr_deacy_period is fairseq's spelling."""

    warmup_updates: int = opt(0, _WARMUP)
    warmup_init_lr: float = opt(-1, _FIRST)
    lr: list[float] = opt(II("optimization.lr"), "Greatest rate, above min_lr.")
    min_lr: float = opt(0.0, _LEAST)
    lr_deacy_period: int = opt(25000, "Updates of a period.")
    lr_decay: float = opt(0.5, "Factor from a period to the next.")


@dataclass
class ManualScheduleConfig(FairseqDataclass):
    """Rates by epoch or update."""

    epoch2lr: str = opt("{}", "Python dict from epochs, such as '1,3-5', to rates.")
    update2lr: str = opt("{}", "Python dict from updates to rates.")
    lr: list[float] = II("optimization.lr")


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
