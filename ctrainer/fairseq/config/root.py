"""FairseqConfig: all groups, in fairseq's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ctrainer.fairseq.config.base import MISSING, FairseqDataclass
from ctrainer.fairseq.config.common import (
    CommonConfig,
    CommonEvalConfig,
    EMAConfig,
    EvalLMConfig,
    FairseqBMUFConfig,
    InteractiveConfig,
)
from ctrainer.fairseq.config.data import (
    CheckpointConfig,
    DatasetConfig,
    OptimizationConfig,
)
from ctrainer.fairseq.config.distributed import DistributedTrainingConfig
from ctrainer.fairseq.config.generation import GenerationConfig


@dataclass
class FairseqConfig(FairseqDataclass):
    """A whole run. The groups typed Any are of components: their dataclass goes by
    `_name` (see `register_component`).

    A new instance holds references such as "${common.fp16}" as defaults; `as_config`
    gives a copy that is resolved and checked.
    """

    common: CommonConfig = field(default_factory=CommonConfig)
    common_eval: CommonEvalConfig = field(default_factory=CommonEvalConfig)
    distributed_training: DistributedTrainingConfig = field(
        default_factory=DistributedTrainingConfig
    )
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    bmuf: FairseqBMUFConfig = field(default_factory=FairseqBMUFConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    eval_lm: EvalLMConfig = field(default_factory=EvalLMConfig)
    interactive: InteractiveConfig = field(default_factory=InteractiveConfig)
    model: Any = MISSING
    task: Any = None
    criterion: Any = None
    optimizer: Any = None
    lr_scheduler: Any = None
    scoring: Any = None
    bpe: Any = None
    tokenizer: Any = None
    ema: EMAConfig = field(default_factory=EMAConfig)


COMPONENTS = (
    "model",
    "task",
    "criterion",
    "optimizer",
    "lr_scheduler",
    "scoring",
    "bpe",
    "tokenizer",
)
