"""The groups `common`, `bmuf` and `ema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ctrainer.arguments.settings import Count, Natural, NotNegative, Portion, Seed
from ctrainer.fairseq.config.base import II, CodeBits, FairseqDataclass, OrOff, opt

LogFormat = Literal["json", "none", "simple", "tqdm"]


@dataclass
class CommonConfig(FairseqDataclass):
    """Logging, seeds, devices and precision."""

    no_progress_bar: bool = opt(False, "Show no progress bar.")
    log_interval: Count = opt(100, "Updates between two lines of progress.")
    log_format: LogFormat | None = opt(
        None,
        "Format of progress: a bar of tqdm, lines of json or simple, none; unset, "
        "tqdm, or simple with no_progress_bar.",
    )
    log_file: str | None = opt(None, "File to which the lines are copied.")
    aim_repo: str | None = opt(None, "Repository of Aim.")
    aim_run_hash: str | None = opt(
        None, "Run of Aim to continue; unset, the run of the same save_dir."
    )
    tensorboard_logdir: str | None = opt(
        None, "Folder for TensorBoard's events; unset, none are written."
    )
    wandb_project: str | None = opt(None, "Project of Weights & Biases to log to.")
    azureml_logging: bool | None = opt(False, "Log to the run of Azure ML.")
    seed: Seed = opt(1, "Seed of the random numbers.")
    cpu: bool = opt(False, "Train on the CPU even where there is a GPU.")
    tpu: bool = opt(False, "Train on a TPU.")
    bf16: bool = opt(False, "Hold weights and gradients in bfloat16.")
    memory_efficient_bf16: bool = opt(
        False, "bf16 without float32 copies of the weights; sets bf16."
    )
    fp16: bool = opt(False, "Hold weights and gradients in float16; scales the loss.")
    memory_efficient_fp16: bool = opt(
        False, "fp16 without float32 copies of the weights; sets fp16."
    )
    fp16_no_flatten_grads: bool = opt(
        False,
        "Keep the float32 gradients of fp16 in tensors of their own, not one buffer.",
    )
    fp16_init_scale: Count = opt(2**7, "First loss scale of fp16.")
    fp16_scale_window: Count | None = opt(
        None,
        "Updates without overflow after which the scale doubles; unset, 16384 by "
        "workers and update_freq.",
    )
    fp16_scale_tolerance: Portion = opt(
        0.0, "Fraction of updates that may overflow before the scale is halved."
    )
    on_cpu_convert_precision: bool = opt(
        False, "Convert batches to fp16 or bf16 before they go to the device."
    )
    min_loss_scale: NotNegative = opt(
        1e-4, "Loss scale of fp16 or amp at which training is given up."
    )
    threshold_loss_scale: NotNegative | None = opt(
        None, "Loss scale of fp16 below which it is not lowered."
    )
    amp: bool = opt(False, "Let torch's autocast choose the precision.")
    amp_batch_retries: Natural = opt(
        2, "Times that a batch is tried again with a lower scale under amp."
    )
    amp_init_scale: Count = opt(2**7, "First loss scale of amp.")
    amp_scale_window: Count | None = opt(
        None, "Updates without overflow after which amp's scale grows."
    )
    split_oom_batches: bool = opt(
        False,
        "Train on a sample that runs out of memory in parts that fit, rather than "
        "drop it: the update stays the same.",
    )
    user_dir: str | None = opt(
        None, "Python package with tasks, models and the like of your own."
    )
    empty_cache_freq: OrOff = opt(
        0, "Updates between two clearings of CUDA's cache; 0: never."
    )
    all_gather_list_size: Count = opt(
        16384, "Bytes that a worker may send when statistics are gathered."
    )
    model_parallel_size: Count = opt(1, "GPUs over which a model is sharded.")
    quantization_config_path: str | None = opt(None, "File that configures quantizing.")
    profile: bool = opt(False, "Mark ranges for NVIDIA's profiler.")
    reset_logging: bool = opt(False, "Set logging up anew when Hydra has done so.")
    suppress_crashes: bool = opt(
        False, "Under Hydra, return what there is when training fails, for sweeps."
    )
    use_plasma_view: bool = opt(False, "Hold indices and sizes in shared memory.")
    plasma_path: str | None = opt("/tmp/plasma", "Socket of the Plasma store.")


@dataclass
class FairseqBMUFConfig(FairseqDataclass):
    """Blockwise model update filtering."""

    block_lr: NotNegative = opt(1, "Learning rate of the block's update.")
    block_momentum: NotNegative = opt(0.875, "Momentum of the block's update.")
    global_sync_iter: Count = opt(50, "Updates in a block.")
    warmup_iterations: Natural = opt(
        500, "Updates after which the first rank's model is sent to all."
    )
    use_nbm: bool = opt(False, "Nesterov's block momentum instead of the classical.")
    average_sync: bool = opt(
        False, "Average the optimizers' moments at each sync instead of resetting them."
    )
    delta_bits: CodeBits = opt(
        32,
        "Bits of a block's parameter deltas: 32, or quantized to 8 or 4. Not an "
        "option of fairseq's.",
    )
    distributed_world_size: Count = II("distributed_training.distributed_world_size")


@dataclass
class EMAConfig(FairseqDataclass):
    """A moving average of the weights beside the model."""

    store_ema: bool = opt(False, "Keep a moving average of the model.")
    ema_decay: Portion = opt(0.9999, "Fraction of the average that stays at each step.")
    ema_start_update: Natural = opt(0, "Update at which averaging starts.")
    ema_seed_model: str | None = opt(
        None, "Checkpoint from which the average starts, other than the model's."
    )
    ema_update_freq: Count = opt(1, "Updates between two steps of the average.")
    ema_fp32: bool = opt(
        False, "Hold the average in float32 whatever the model's dtype."
    )
