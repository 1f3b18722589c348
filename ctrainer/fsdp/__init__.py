"""Fully sharded data parallelism, and the checkpoints of sharded modules."""

from ctrainer.fsdp.consolidate import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    reshard_checkpoints,
)
from ctrainer.fsdp.flatten import FlatParameter, FlattenParamsWrapper
from ctrainer.fsdp.layout import FLOAT_DTYPES, apply_to_tensors, collect_tensors
from ctrainer.fsdp.memory_plan import MemoryPlan, UnitSize, memory_plan, units_of
from ctrainer.fsdp.module import (
    FullyShardedDataParallel,
    XlaFullyShardedDataParallel,
)
from ctrainer.fsdp.options import hybrid_groups
from ctrainer.fsdp.shard_files import load_shard, save_shard
from ctrainer.fsdp.sharded import TrainingState

__all__ = [
    "FLOAT_DTYPES",
    "FlatParameter",
    "FlattenParamsWrapper",
    "FullyShardedDataParallel",
    "MemoryPlan",
    "TrainingState",
    "UnitSize",
    "XlaFullyShardedDataParallel",
    "apply_to_tensors",
    "collect_tensors",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
    "hybrid_groups",
    "load_shard",
    "memory_plan",
    "reshard_checkpoints",
    "save_shard",
    "units_of",
]
