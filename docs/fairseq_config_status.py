"""Which options have an effect: the table behind the statuses in fairseq_config.md.

An option that is neither supported nor rejected is read: checked
and kept in the config.
"""

from __future__ import annotations

_BAR = "by training_progress_bar"
_TRACKER = "training_progress_bar raises ValueError; use tensorboard_logdir"
_START = "by distributed.call_main"
_WRAPPER = "by Trainer, of pytorch_ddp"
_WHOLE = "Trainer raises ValueError: every worker holds the whole model"

_TRAIN = "by fairseq-train"
_STEP = "by Trainer"
_BLOCKS = "by Trainer, with use_bmuf"
_LOCAL = "by Trainer, of slowmo"
_SHARDS = "by Trainer, of fully_sharded"

SUPPORTED = {
    "bmuf.average_sync": _BLOCKS,
    "bmuf.block_lr": _BLOCKS,
    "bmuf.block_momentum": _BLOCKS,
    "bmuf.delta_bits": _BLOCKS,
    "bmuf.distributed_world_size": _BLOCKS,
    "bmuf.global_sync_iter": _BLOCKS,
    "bmuf.use_nbm": _BLOCKS,
    "bmuf.warmup_iterations": _BLOCKS,
    "checkpoint.best_checkpoint_metric": _TRAIN,
    "checkpoint.checkpoint_suffix": _TRAIN,
    "checkpoint.continue_once": _TRAIN,
    "checkpoint.finetune_from_model": _TRAIN,
    "checkpoint.keep_best_checkpoints": _TRAIN,
    "checkpoint.keep_interval_updates": _TRAIN,
    "checkpoint.keep_interval_updates_pattern": _TRAIN,
    "checkpoint.keep_last_epochs": _TRAIN,
    "checkpoint.load_checkpoint_on_all_dp_ranks": _STEP,
    "checkpoint.maximize_best_checkpoint_metric": _TRAIN,
    "checkpoint.no_epoch_checkpoints": _TRAIN,
    "checkpoint.no_last_checkpoints": _TRAIN,
    "checkpoint.no_save": _TRAIN,
    "checkpoint.no_save_optimizer_state": _STEP,
    "checkpoint.optimizer_overrides": _TRAIN,
    "checkpoint.patience": _TRAIN,
    "checkpoint.reset_dataloader": _TRAIN,
    "checkpoint.reset_lr_scheduler": _TRAIN,
    "checkpoint.reset_meters": _TRAIN,
    "checkpoint.reset_optimizer": _TRAIN,
    "checkpoint.restore_file": _TRAIN,
    "checkpoint.save_dir": _TRAIN,
    "checkpoint.save_interval": _TRAIN,
    "checkpoint.save_interval_updates": _TRAIN,
    "checkpoint.write_checkpoints_asynchronously": _STEP,
    "common.amp": _STEP,
    "common.amp_batch_retries": _STEP,
    "common.amp_scale_window": _STEP,
    "common.bf16": _STEP,
    "common.cpu": _STEP,
    "common.empty_cache_freq": _STEP,
    "common.fp16": _STEP,
    "common.fp16_init_scale": _STEP,
    "common.fp16_no_flatten_grads": _STEP,
    "common.fp16_scale_tolerance": _STEP,
    "common.fp16_scale_window": _STEP,
    "common.log_file": _BAR,
    "common.log_format": _BAR,
    "common.log_interval": _BAR,
    "common.memory_efficient_bf16": "sets bf16",
    "common.memory_efficient_fp16": "sets fp16",
    "common.min_loss_scale": _STEP,
    "common.no_progress_bar": _BAR,
    "common.on_cpu_convert_precision": _STEP,
    "common.seed": _STEP,
    "common.tensorboard_logdir": _BAR,
    "common.split_oom_batches": _STEP,
    "common.threshold_loss_scale": _STEP,
    "common.user_dir": _TRAIN,
    "common.wandb_project": _BAR,
    "dataset.batch_size": _STEP,
    "dataset.batch_size_valid": _STEP,
    "dataset.combine_valid_subsets": _TRAIN,
    "dataset.curriculum": _TRAIN,
    "dataset.data_buffer_size": _STEP,
    "dataset.dataset_impl": "by the tasks",
    "dataset.disable_validation": _TRAIN,
    "dataset.fixed_validation_seed": _TRAIN,
    "dataset.grouped_shuffling": _STEP,
    "dataset.ignore_unused_valid_subsets": _TRAIN,
    "dataset.max_tokens": _STEP,
    "dataset.max_tokens_valid": _STEP,
    "dataset.max_valid_steps": _TRAIN,
    "dataset.num_workers": _STEP,
    "dataset.required_batch_size_multiple": _STEP,
    "dataset.required_seq_len_multiple": "by translation",
    "dataset.skip_invalid_size_inputs_valid_test": _STEP,
    "dataset.train_subset": _STEP,
    "dataset.update_epoch_batch_itr": _STEP,
    "dataset.update_ordered_indices_seed": _STEP,
    "dataset.valid_subset": _TRAIN,
    "dataset.validate_after_updates": _TRAIN,
    "dataset.validate_interval": _TRAIN,
    "dataset.validate_interval_updates": _TRAIN,
    "distributed_training.broadcast_buffers": _WRAPPER,
    "distributed_training.bucket_cap_mb": _WRAPPER,
    "distributed_training.cpu_offload": _SHARDS + ", of a model on a GPU",
    "distributed_training.ddp_backend": "by Trainer",
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
    "distributed_training.fp32_reduce_scatter": _SHARDS + " with fp16 or bf16",
    "distributed_training.gather_bits": _SHARDS,
    "distributed_training.gradient_as_bucket_view": _WRAPPER,
    "distributed_training.heartbeat_timeout": "by distributed_init: collectives wait "
    "for that long",
    "distributed_training.localsgd_frequency": _LOCAL,
    "distributed_training.no_reshard_after_forward": _SHARDS,
    "distributed_training.not_fsdp_flatten_parameters": _SHARDS,
    "distributed_training.nprocs_per_node": _LOCAL + ", 1 alone",
    "distributed_training.reduce_bits": _SHARDS,
    "distributed_training.slowmo_base_algorithm": _LOCAL + ", localsgd alone",
    "distributed_training.slowmo_momentum": _LOCAL,
    "distributed_training.use_sharded_state": _SHARDS,
    "distributed_training.zero_sharding": _STEP,
    "ema.ema_decay": _STEP,
    "ema.ema_fp32": _STEP,
    "ema.ema_seed_model": _STEP,
    "ema.ema_start_update": _STEP,
    "ema.ema_update_freq": _STEP,
    "ema.store_ema": _STEP,
    "optimization.clip_norm": _STEP,
    "optimization.lr": "by the schedules",
    "optimization.max_epoch": _TRAIN,
    "optimization.max_update": _TRAIN,
    "optimization.sentence_avg": "by the criterions",
    "optimization.skip_remainder_batch": _TRAIN,
    "optimization.stop_min_lr": _TRAIN,
    "optimization.stop_time_hours": _TRAIN,
    "optimization.update_freq": _TRAIN,
    "optimization.use_bmuf": "by Trainer",
}
# Of all options of a kind of component.
SUPPORTED_COMPONENTS = {
    "criterion": "by the criterion",
    "lr_scheduler": "by build_lr_scheduler",
    "model": "by the model",
}
REJECTED = {
    "common.aim_repo": _TRACKER,
    "common.azureml_logging": _TRACKER,
    "common.model_parallel_size": _WHOLE,
    "common.profile": "fairseq-train raises ValueError",
    "common.quantization_config_path": "fairseq-train raises ValueError",
    "common.tpu": "Trainer raises ValueError",
    "distributed_training.pipeline_model_parallel": _WHOLE,
    "task.translation.eval_bleu": "nothing generates translations here to score",
    "task.translation.load_alignments": "no criterion here learns from alignments",
    "task.translation.num_batch_buckets": "batches are padded to their longest sample",
}


def status_of(option: str) -> str:
    """The status of "group.option" or "component.name.option", with where or why."""
    if option in SUPPORTED:
        return f"supported: {SUPPORTED[option]}"
    component = option.partition(".")[0]
    if component in SUPPORTED_COMPONENTS:
        return f"supported: {SUPPORTED_COMPONENTS[component]}"
    if option in REJECTED:
        return f"rejected when set: {REJECTED[option]}"
    return "read"
