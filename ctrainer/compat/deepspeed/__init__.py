"""DeepSpeed's and transformers' names for a DeepSpeed configuration, and DeepSpeed's
learning-rate schedules, without DeepSpeed."""

from ctrainer.arguments.deepspeed import HfDeepSpeedConfig, HfTrainerDeepSpeedConfig
from ctrainer.arguments.deepspeed_keys import json_schema
from ctrainer.compat.deepspeed._config import (
    DeepSpeedBF16Config,
    DeepSpeedConfig,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    get_bfloat16_config,
    get_float16_config,
)
from ctrainer.deepspeed_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = [
    "DeepSpeedBF16Config",
    "DeepSpeedConfig",
    "DeepSpeedFP16Config",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "HfDeepSpeedConfig",
    "HfTrainerDeepSpeedConfig",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "get_bfloat16_config",
    "get_float16_config",
    "json_schema",
]
