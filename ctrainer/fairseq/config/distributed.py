"""The group `distributed_training`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Literal

from ctrainer.arguments.settings import Count, Fraction, Natural, Range
from ctrainer.fairseq.config.base import II, CodeBits, FairseqDataclass, OrOff, opt

DdpBackend = Literal[
    "c10d", "fully_sharded", "legacy_ddp", "no_c10d", "pytorch_ddp", "slowmo"
]


@cache
def _visible_gpus() -> int:
    """How many GPUs torch sees, at least 1; without torch, 1."""
    if find_spec("torch") is None:
        return 1
    count: int = import_module("ctrainer.runtime.torch_process").visible_gpus()
    return max(1, count)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


@dataclass
class DistributedTrainingConfig(FairseqDataclass):
    """Workers and how they exchange gradients."""

    distributed_world_size: Count = opt(
        _visible_gpus,
        "Workers on all nodes; by default a worker a visible GPU.",
        default_text="visible GPUs, or 1",
    )
    distributed_num_procs: Natural | None = opt(
        _visible_gpus,
        "Processes to start here; by default one a visible GPU.",
        default_text="visible GPUs, or 1",
    )
    distributed_rank: Natural | None = opt(0, "Rank of this worker.")
    distributed_backend: str = opt("nccl", "Backend of torch.distributed.")
    distributed_init_method: str | None = opt(
        None, "Rendezvous of the workers, such as tcp://host:port."
    )
    distributed_port: Annotated[int, Range("[-1, 65535]")] = opt(
        -1, "Port of the rendezvous; not needed with distributed_init_method."
    )
    device_id: Natural = opt(
        _local_rank,
        "GPU of this worker; by default LOCAL_RANK.",
        argparse_alias="--local_rank",
        default_text="`LOCAL_RANK`, or 0",
    )
    distributed_no_spawn: bool = opt(
        False, "Start no further processes, however many GPUs are visible."
    )
    ddp_backend: DdpBackend = opt(
        "pytorch_ddp",
        "What exchanges gradients; c10d means pytorch_ddp, no_c10d legacy_ddp.",
    )
    ddp_comm_hook: Literal["none", "fp16"] = opt(
        "none", "Compress gradients on their way: to fp16, or not."
    )
    bucket_cap_mb: Count = opt(25, "Size of the buckets in MiB.")
    fix_batches_to_gpus: bool = opt(
        False, "Give a worker the same batches each epoch, in another order."
    )
    find_unused_parameters: bool = opt(
        False, "Look for parameters without gradients; legacy_ddp needs no looking."
    )
    gradient_as_bucket_view: bool = opt(
        False, "Make gradients views of the buckets, which saves memory."
    )
    fast_stat_sync: bool = opt(
        False, "Deprecated: the criterion says how statistics are added."
    )
    heartbeat_timeout: OrOff = opt(
        -1, "Seconds without progress after which the job is killed; -1: never."
    )
    broadcast_buffers: bool = opt(
        False, "Send the first rank's buffers, such as batch statistics, to all."
    )
    slowmo_momentum: Fraction | None = opt(
        None,
        "SlowMo's momentum; by default 0 up to 16 workers, 0.2 up to 32, 0.5 up to "
        "64, else 0.6.",
    )
    slowmo_base_algorithm: str = opt("localsgd", "What SlowMo wraps: localsgd or sgp.")
    localsgd_frequency: Count = opt(3, "Updates between two exchanges of local SGD.")
    nprocs_per_node: Count = opt(
        _visible_gpus,
        "GPUs of a node, within which SlowMo reduces all gradients.",
        default_text="visible GPUs, or 1",
    )
    pipeline_model_parallel: bool = opt(False, "Spread the layers over GPUs.")
    pipeline_balance: str | None = opt(
        None, "Layers of each piece, separated by commas."
    )
    pipeline_devices: str | None = opt(None, "Device of each piece.")
    pipeline_chunks: Natural | None = opt(0, "Micro-batches of the pipeline.")
    pipeline_encoder_balance: str | None = opt(
        None, "Layers of each piece of the encoder."
    )
    pipeline_encoder_devices: str | None = opt(
        None, "Device of each piece of the encoder."
    )
    pipeline_decoder_balance: str | None = opt(
        None, "Layers of each piece of the decoder."
    )
    pipeline_decoder_devices: str | None = opt(
        None, "Device of each piece of the decoder."
    )
    pipeline_checkpoint: Literal["always", "never", "except_last"] = opt(
        "never", "Which micro-batches' activations the pipeline recomputes."
    )
    zero_sharding: Literal["none", "os"] = opt(
        "none", "Shard nothing, or the optimizer's state."
    )
    fp16: bool = II("common.fp16")
    memory_efficient_fp16: bool = II("common.memory_efficient_fp16")
    tpu: bool = II("common.tpu")
    # For ddp_backend fully_sharded:
    no_reshard_after_forward: bool = opt(
        False, "Keep whole parameters between the forward and the backward pass."
    )
    fp32_reduce_scatter: bool = opt(False, "Exchange gradients in float32.")
    cpu_offload: bool = opt(False, "Hold the float32 parameters in host memory.")
    use_sharded_state: bool = opt(False, "Let each worker save its shard.")
    not_fsdp_flatten_parameters: bool = opt(
        False, "Keep the parameters of a wrapped module apart."
    )
    gather_bits: CodeBits = opt(
        32,
        "Bits of gathered parameters: 32, or quantized to 8 or 4. Not an option "
        "of fairseq's.",
    )
    reduce_bits: CodeBits = opt(
        32,
        "Bits of reduced gradients: 32, or quantized to 8 or 4 with an error-feedback "
        "residual. Not an option of fairseq's.",
    )
