"""The groups of the optimizers, `optimizer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ctrainer.arguments.settings import Fraction, NotNegative, Portion, Positive, Range
from ctrainer.fairseq.config.base import II, FairseqDataclass, LearningRates, Pair, opt

_WD = "Weight decay."
_ALIAS = "--wd"
_BETAS = Pair("[0, 1)")


@dataclass
class FairseqAdamConfig(FairseqDataclass):
    """Adam with decoupled weight decay."""

    adam_betas: Annotated[Any, _BETAS] = opt((0.9, 0.999), "Decays of the two means.")
    adam_eps: NotNegative = opt(1e-8, "Added to the root of the mean square.")
    weight_decay: NotNegative = opt(0.0, _WD)
    use_old_adam: bool = opt(False, "Never use the fused kernel.")
    fp16_adam_stats: bool = opt(False, "Hold the means in float16, scaled.")
    tpu: bool = II("common.tpu")
    lr: LearningRates = II("optimization.lr")


@dataclass
class FairseqNAGConfig(FairseqDataclass):
    """Nesterov's accelerated gradient."""

    momentum: NotNegative = opt(0.99, "Momentum.")
    weight_decay: NotNegative = opt(0.0, _WD)
    lr: LearningRates = II("optimization.lr")


@dataclass
class FairseqCPUAdamConfig(FairseqDataclass):
    """Adam on the host."""

    adam_betas: Annotated[str, _BETAS] = opt("(0.9, 0.999)", "Decays of the two means.")
    adam_eps: NotNegative = opt(1e-8, "Added to the root of the mean square.")
    weight_decay: NotNegative = opt(0.0, _WD)
    fp16_adam_stats: bool = opt(False, "Hold the means in float16, scaled.")
    lr: LearningRates = II("optimization.lr")


@dataclass
class CompositeOptimizerConfig(FairseqDataclass):
    """An optimizer and a schedule for each group of parameters."""

    groups: dict[str, Any] = opt(
        dict, "From a group's name to its optimizer and lr_scheduler."
    )
    dynamic_groups: bool = opt(
        False, "Make groups of the parameters' attributes; else each must name one."
    )


# What follows fairseq has as command-line options alone; names and defaults are those.
@dataclass
class AdamaxConfig(FairseqDataclass):
    """Adam with the largest gradient instead of the mean square."""

    adamax_betas: Annotated[str, _BETAS] = opt("(0.9, 0.999)", "Decays of the two.")
    adamax_eps: NotNegative = opt(1e-8, "Added to the largest gradient.")
    weight_decay: NotNegative = opt(0.0, _WD, argparse_alias=_ALIAS)
    no_bias_correction: bool = opt(False, "Leave the first updates small.")
    lr: LearningRates = II("optimization.lr")


@dataclass
class SGDConfig(FairseqDataclass):
    """Gradient descent with momentum."""

    momentum: NotNegative = opt(0.0, "Momentum.")
    weight_decay: NotNegative = opt(0.0, _WD, argparse_alias=_ALIAS)
    lr: LearningRates = II("optimization.lr")


@dataclass
class AdadeltaConfig(FairseqDataclass):
    """Adadelta."""

    adadelta_rho: Portion = opt(0.9, "Decay of the mean squares.")
    adadelta_eps: NotNegative = opt(1e-6, "Added to the mean squares.")
    weight_decay: NotNegative = opt(0.0, _WD, argparse_alias=_ALIAS)
    anneal_eps: bool = opt(False, "Lower adadelta_eps over the run.")
    lr: LearningRates = II("optimization.lr")


@dataclass
class AdagradConfig(FairseqDataclass):
    """Adagrad."""

    weight_decay: NotNegative = opt(0.0, _WD, argparse_alias=_ALIAS)
    lr: LearningRates = II("optimization.lr")


@dataclass
class AdafactorConfig(FairseqDataclass):
    """Adam with factored mean squares."""

    adafactor_eps: Annotated[str, Pair("[0, inf)")] = opt(
        "(1e-30, 1e-3)", "Added to squares, and least scale."
    )
    clip_threshold: Positive = opt(1.0, "Greatest root mean square of an update.")
    decay_rate: Annotated[float, Range("(-inf, 0]")] = opt(
        -0.8, "Exponent of the mean squares' decay."
    )
    beta1: Fraction | None = opt(None, "Decay of the mean; None: no mean.")
    weight_decay: NotNegative = opt(0.0, _WD, argparse_alias=_ALIAS)
    scale_parameter: bool = opt(
        False, "Multiply the learning rate by the parameter's size."
    )
    relative_step: bool = opt(
        False, "Lower the learning rate with the square root of updates."
    )
    warmup_init: bool = opt(False, "Warm up that learning rate.")
    lr: LearningRates = II("optimization.lr")


@dataclass
class LambConfig(FairseqDataclass):
    """LAMB."""

    lamb_betas: Annotated[str, _BETAS] = opt("(0.9, 0.999)", "Decays of the two means.")
    lamb_eps: NotNegative = opt(1e-8, "Added to the root of the mean square.")
    weight_decay: NotNegative = opt(0.0, _WD, argparse_alias=_ALIAS)
    lr: LearningRates = II("optimization.lr")


OPTIMIZERS: dict[str, type[FairseqDataclass]] = {
    "adadelta": AdadeltaConfig,
    "adafactor": AdafactorConfig,
    "adagrad": AdagradConfig,
    "adam": FairseqAdamConfig,
    "adamax": AdamaxConfig,
    "composite": CompositeOptimizerConfig,
    "cpu_adam": FairseqCPUAdamConfig,
    "lamb": LambConfig,
    "nag": FairseqNAGConfig,
    "sgd": SGDConfig,
}
