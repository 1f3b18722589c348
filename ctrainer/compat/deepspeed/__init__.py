"""DeepSpeed's names over ctrainer's engine, without DeepSpeed: `from ctrainer.compat
import deepspeed` in the place of `import deepspeed`.
"""

from ctrainer.arguments.deepspeed import HfDeepSpeedConfig, HfTrainerDeepSpeedConfig
from ctrainer.arguments.deepspeed_keys import json_schema
from ctrainer.compat.deepspeed import zero
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
from ctrainer.compat.deepspeed._engine import DeepSpeedEngine, initialize
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
    "DeepSpeedEngine",
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
    "initialize",
    "json_schema",
    "zero",
]
