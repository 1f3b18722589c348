"""DeepSpeed's and transformers' names for a DeepSpeed configuration, and DeepSpeed's
learning-rate schedules, without DeepSpeed."""

from ctrainer.arguments.deepspeed import HfDeepSpeedConfig, HfTrainerDeepSpeedConfig
from ctrainer.arguments.deepspeed_keys import json_schema
from ctrainer.deepspeed_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = [
    "HfDeepSpeedConfig",
    "HfTrainerDeepSpeedConfig",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "json_schema",
]
