"""fairscale's names over ctrainer's engine: `from ctrainer.compat.fairscale import ...`
in the place of `from fairscale.nn import ...` and `from fairscale.optim import ...`.
"""

from ctrainer.compat.fairscale._batch_norm import auto_wrap_bn
from ctrainer.compat.fairscale._fsdp import (
    FullyShardedDataParallel,
    get_fsdp_instances,
)
from ctrainer.compat.fairscale._optim_state import is_singleton_tensor
from ctrainer.compat.fairscale._oss import OSS
from ctrainer.compat.fairscale._scaler import ShardedGradScaler
from ctrainer.compat.fairscale._sharded_ddp import ShardedDataParallel
from ctrainer.compat.fairscale._wrap import (
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from ctrainer.fsdp import TrainingState
from ctrainer.fsdp.flatten import FlattenParamsWrapper
from ctrainer.fsdp.recompute import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)

__all__ = [
    "OSS",
    "FlattenParamsWrapper",
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "TrainingState",
    "auto_wrap",
    "auto_wrap_bn",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "disable_checkpointing",
    "enable_wrap",
    "get_fsdp_instances",
    "is_checkpointing",
    "is_recomputing",
    "is_singleton_tensor",
    "wrap",
]
