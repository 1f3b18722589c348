"""What becomes of each option: the table from which docs/fairseq_config.md is made.

An option that is neither honoured nor refused is read: checked, kept for whoever asks
for it, and acted on by nothing in this package.
"""

from __future__ import annotations

_BAR = "by training_progress_bar"
_TRACKER = "training_progress_bar raises ValueError; use tensorboard_logdir"
_START = "by distributed.call_main"
_WRAPPER = "by Trainer, of pytorch_ddp"
_WHOLE = "Trainer raises ValueError: every worker holds the whole model"

HONOURED = {
    "common.log_file": _BAR,
    "common.log_format": _BAR,
    "common.log_interval": _BAR,
    "common.memory_efficient_bf16": "sets bf16",
    "common.memory_efficient_fp16": "sets fp16",
    "common.no_progress_bar": _BAR,
    "common.tensorboard_logdir": _BAR,
    "common.wandb_project": _BAR,
    "distributed_training.broadcast_buffers": _WRAPPER,
    "distributed_training.bucket_cap_mb": _WRAPPER,
    "distributed_training.ddp_backend": "by Trainer; fully_sharded and, of several "
    "workers, slowmo are refused",
    "distributed_training.ddp_comm_hook": _WRAPPER,
    "distributed_training.device_id": _START,
    "distributed_training.distributed_backend": _START + "; on the CPU nccl means gloo",
    "distributed_training.distributed_init_method": _START,
    "distributed_training.distributed_no_spawn": _START,
    "distributed_training.distributed_num_procs": _START,
    "distributed_training.distributed_port": _START + ", under SLURM",
    "distributed_training.distributed_rank": _START,
    "distributed_training.distributed_world_size": _START + " and Trainer",
    "distributed_training.find_unused_parameters": _WRAPPER,
    "distributed_training.fix_batches_to_gpus": "by fairseq-train",
    "distributed_training.gradient_as_bucket_view": _WRAPPER,
    "distributed_training.heartbeat_timeout": "by distributed_init: collectives wait "
    "for that long",
}
# Of all options of a kind of component.
HONOURED_COMPONENTS = {"lr_scheduler": "by build_lr_scheduler"}
REFUSED = {
    "common.aim_repo": _TRACKER,
    "common.azureml_logging": _TRACKER,
    "distributed_training.cpu_offload": "Trainer raises ValueError",
    "distributed_training.pipeline_model_parallel": _WHOLE,
    "distributed_training.zero_sharding": _WHOLE,
}


def status_of(option: str) -> str:
    """The status of "group.option" or "component.name.option", with where or why."""
    if option in HONOURED:
        return f"honoured: {HONOURED[option]}"
    component = option.partition(".")[0]
    if component in HONOURED_COMPONENTS:
        return f"honoured: {HONOURED_COMPONENTS[component]}"
    if option in REFUSED:
        return f"refused when set: {REFUSED[option]}"
    return "read"
