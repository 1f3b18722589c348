"""FairseqConfig: all groups, in fairseq's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ctrainer.fairseq.config.base import MISSING, FairseqDataclass
from ctrainer.fairseq.config.common import CommonConfig, EMAConfig, FairseqBMUFConfig
from ctrainer.fairseq.config.data import (
    CheckpointConfig,
    DatasetConfig,
    OptimizationConfig,
)
from ctrainer.fairseq.config.distributed import DistributedTrainingConfig


@dataclass
class FairseqConfig(FairseqDataclass):
    """The configuration of a whole run, in fairseq's groups.

    A new instance holds references such as "${common.fp16}" as defaults; `as_config`
    returns a copy that is resolved and checked. The dataclass of a component's group
    goes by its `_name`, see `register_component`.

    Args:
        generation: Options of programs that generate; nothing here reads them.
        model (default MISSING): Options of the model, with the architecture in `_name`.
        task (default None): Options of the task, with its name in `_name`; None:
            `as_config` decides.
        criterion (default None): Options of the criterion.
        optimizer (default None): Options of the optimizer.
        lr_scheduler (default None): Options of the schedule.
        scoring (default None): Options of the scorer of generated text; nothing here
            reads them.
        bpe (default None): Options of the subword encoding; nothing here reads them.
        tokenizer (default None): Options of the tokenizer; nothing here reads them.

    Example:
        >>> from ctrainer.fairseq.config import FairseqConfig
        >>> FairseqConfig().optimization.lr
        [0.25]
    """

    common: CommonConfig = field(default_factory=CommonConfig)
    distributed_training: DistributedTrainingConfig = field(
        default_factory=DistributedTrainingConfig
    )
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    bmuf: FairseqBMUFConfig = field(default_factory=FairseqBMUFConfig)
    # fairseq's generation from a checkpoint reads this group: kept as it is given.
    generation: Any = field(default_factory=lambda: {"print_alignment": None})
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
# Groups of fairseq's programs that are not here.
LEFT_OUT = ("common_eval", "eval_lm", "interactive")
