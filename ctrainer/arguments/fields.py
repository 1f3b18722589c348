"""The fields of TrainingArguments in the names, order and defaults of transformers
5.17.

Positional arguments depend on the order. HfArgumentParser looks at the second member
of a union, hence the unusual places of None. `table.py` has the status of each field.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Literal, Self

from ctrainer.arguments.settings import (
    Count,
    Finite,
    Fraction,
    Natural,
    NotNegative,
    Seed,
    read,
    reject_keywords,
    without_none,
)
from ctrainer.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)

_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


def arg(default: Any, text: str, **metadata: Any) -> Any:
    """A field with the help of a command line; metadata goes to argparse."""
    return field(default=default, metadata={"help": text, **metadata})


def read_field(spec: Field[Any], hint: Any, value: Any) -> Any:
    """The value of a field, converted by `hint` and the field's choices. None means a
    default that is 0, false or empty. Raises ValueError naming the field."""
    if value is spec.default:
        return value
    _, optional = without_none(hint)
    if value is None and not optional and not spec.default:
        return spec.default
    if value is None and spec.default_factory is not MISSING:
        return spec.default_factory()
    if "choices" in spec.metadata:
        hint = Literal[tuple(spec.metadata["choices"])]
        hint = hint | None if optional else hint
    return read(value, hint, spec.name)


@dataclass(init=False, repr=False, eq=False)
class CurrentFields:
    """In the groups of transformers' documentation: training, optimizer, precision,
    logging, evaluation, saving, Hub, reproducibility, data, distribution, scripts."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise TypeError for a keyword that is no field, with the nearest that is."""
        reject_keywords(cls.__name__, cls.__init__, kwargs)
        return super().__new__(cls)

    output_dir: str | None = arg(
        None, "Folder for checkpoints and results; trainer_output when not given."
    )
    per_device_train_batch_size: Count = arg(8, "Rows in a training micro-batch.")
    num_train_epochs: float = arg(3.0, "Passes over the data; may have a fraction.")
    max_steps: int = arg(-1, "Updates to do; above 0 it overrides num_train_epochs.")
    learning_rate: NotNegative = arg(5e-5, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = arg("linear", "Learning-rate schedule.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = arg(
        None, "Options of the schedule, such as num_cycles; a dict or its JSON."
    )
    warmup_steps: NotNegative = arg(
        0, "Warm-up updates of the learning rate; below 1, a fraction of the run."
    )
    # transformers says adamw_torch where torch is older than 2.8; here both are one.
    optim: OptimizerNames | str = arg("adamw_torch_fused", "Optimizer.")
    optim_args: str | None = arg(None, "Options of the optimizer, as 'name=value,...'.")
    weight_decay: NotNegative = arg(
        0.0, "Decoupled decay of weights, not of biases or norms."
    )
    adam_beta1: Fraction = arg(0.9, "Decay of the mean of gradients.")
    adam_beta2: Fraction = arg(0.999, "Decay of the mean of squared gradients.")
    adam_epsilon: NotNegative = arg(1e-8, "Added to the root of the mean square.")
    optim_target_modules: None | str | list[str] = arg(  # noqa: RUF036
        None, "Modules for GaLore and APOLLO."
    )
    gradient_accumulation_steps: Count = arg(1, "Micro-batches in an update.")
    average_tokens_across_devices: bool = arg(
        True, "Count the targets of a batch over all ranks."
    )
    max_grad_norm: float = arg(
        1.0, "Maximum gradient norm, to which gradients are clipped; 0: no clipping."
    )
    label_smoothing_factor: Fraction = arg(
        0.0, "Fraction of a target's weight that is spread over all classes."
    )
    bf16: bool = arg(False, "Mixed precision: bfloat16 under torch's autocast.")
    fp16: bool = arg(
        False, "Mixed precision: float16 under torch's autocast, with a loss scale."
    )
    bf16_full_eval: bool = arg(False, "Evaluate with weights in bfloat16.")
    fp16_full_eval: bool = arg(False, "Evaluate with weights in float16.")
    tf32: bool | None = arg(
        None, "TF32 in CUDA's matrix products; None: torch's choice."
    )
    gradient_checkpointing: bool = arg(
        False, "Recompute activations in the backward pass instead of keeping them."
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Options of gradient checkpointing; a dict or its JSON."
    )
    torch_compile: bool = arg(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = arg(
        None, "Backend of torch.compile; implies torch_compile."
    )
    torch_compile_mode: str | None = arg(
        None, "Mode of torch.compile; implies torch_compile."
    )
    use_liger_kernel: bool = arg(False, "Replace layers by Liger's kernels.")
    liger_kernel_config: dict[str, bool] | None = arg(
        None, "Which of Liger's kernels to apply."
    )
    use_cache: bool = arg(False, "Value of model.config.use_cache while training.")
    neftune_noise_alpha: Finite | None = arg(
        None, "Strength of NEFTune's noise on the input embeddings."
    )
    torch_empty_cache_steps: Count | None = arg(
        None, "Empty the device's allocator cache every so many steps."
    )
    auto_find_batch_size: bool = arg(
        False,
        "A micro-batch that runs out of memory is trained on in parts that fit: the "
        "update stays the same.",
    )
    logging_strategy: IntervalStrategy | str = arg("steps", "When to log.")
    logging_steps: Finite = arg(
        500, "Updates between logs; below 1, a fraction of the run."
    )
    logging_first_step: bool = arg(False, "Log the first update too.")
    log_on_each_node: bool = arg(True, "Log once per machine, not once in total.")
    logging_nan_inf_filter: bool = arg(
        True, "Exclude losses that are NaN or Inf from the logged mean."
    )
    include_num_input_tokens_seen: str | bool = arg(
        "no", "Count input tokens: 'all', 'non_padding' or 'no'."
    )
    log_level: str = arg(
        "passive", "Log level; passive does not change it.", choices=_LEVELS
    )
    log_level_replica: str = arg(
        "warning", "Log level on ranks other than 0.", choices=_LEVELS
    )
    disable_tqdm: bool | None = arg(None, "Print logs instead of the live display.")
    report_to: None | str | list[str] = arg(  # noqa: RUF036
        "none", "Trackers: names, 'all' for the installed ones, or 'none'."
    )
    run_name: str | None = arg(None, "Name of the run in trackers.")
    project: str = arg("huggingface", "Project in Trackio.")
    trackio_space_id: str | None = arg(None, "Space for Trackio.")
    trackio_bucket_id: str | None = arg(None, "Bucket for Trackio.")
    trackio_static_space_id: str | None | Literal[False] = arg(  # noqa: RUF036
        None, "Static space for Trackio; False: none."
    )
    eval_strategy: IntervalStrategy | str = arg("no", "When to evaluate.")
    eval_steps: Finite | None = arg(
        None,
        "Updates between evaluations; below 1, a fraction of the run; None: "
        "logging_steps.",
    )
    eval_delay: Finite = arg(0, "Steps or epochs before the first evaluation.")
    per_device_eval_batch_size: Count = arg(8, "Rows in an evaluation batch.")
    prediction_loss_only: bool = arg(False, "Evaluate the loss alone.")
    eval_on_start: bool = arg(False, "Evaluate before the first update.")
    eval_do_concat_batches: bool = arg(
        True, "Concatenate the batches' outputs; False: pass them as lists."
    )
    eval_use_gather_object: bool = arg(False, "Gather outputs of ranks as objects.")
    eval_accumulation_steps: Count | None = arg(
        None, "Batches whose results may still be on their way to host memory; None: 1."
    )
    include_for_metrics: list[str] = field(
        default_factory=list,
        metadata={"help": "Additional inputs of compute_metrics: 'inputs', 'loss'."},
    )
    batch_eval_metrics: bool = arg(False, "Call compute_metrics after each batch.")
    save_only_model: bool = arg(
        False, "Save the model without optimizer, schedule, scale and generators."
    )
    save_strategy: SaveStrategy | str = arg("steps", "When to save a checkpoint.")
    save_steps: Finite = arg(
        500, "Updates between checkpoints; below 1, a fraction of the run."
    )
    save_on_each_node: bool = arg(False, "Save once per machine.")
    save_total_limit: int | None = arg(
        None,
        "Checkpoints to keep; the best and the last always stay, and at the "
        "end of a run with 1 the best.",
    )
    enable_jit_checkpoint: bool = arg(
        False, "Save a checkpoint on SIGTERM; see save_on_signal."
    )
    push_to_hub: bool = arg(False, "Push the model to the Hub when it is saved.")
    hub_token: str | None = arg(None, "Token for the Hub.")
    hub_private_repo: bool | None = arg(None, "Make the repository private.")
    hub_model_id: str | None = arg(None, "Repository on the Hub.")
    hub_strategy: HubStrategy | str = arg("every_save", "When to push, and what.")
    hub_always_push: bool = arg(False, "Push even while another push runs.")
    hub_revision: str | None = arg(None, "Branch on the Hub.")
    load_best_model_at_end: bool = arg(False, "End with the best checkpoint's weights.")
    metric_for_best_model: str | None = arg(
        None, "Metric by which checkpoints are compared."
    )
    greater_is_better: bool | None = arg(
        None,
        "Whether a greater metric is better; None: yes, unless its name ends in "
        "'loss'.",
    )
    ignore_data_skip: bool = arg(False, "Resume at the start of the data.")
    restore_callback_states_from_checkpoint: bool = arg(
        False, "Restore the callbacks' arguments too, not only their counters."
    )
    full_determinism: bool = arg(False, "Use deterministic algorithms of torch only.")
    seed: Seed = arg(42, "Seed of every random generator.")
    data_seed: Natural | None = arg(None, "Seed of the order of the data; None: seed.")
    use_cpu: bool = arg(False, "Train on the CPU even where a GPU is visible.")
    accelerator_config: dict[str, Any] | str | None = arg(
        None, "Settings of accelerate; a dict or a JSON file."
    )
    parallelism_config: dict[str, Any] | str | None = arg(
        None, "Parallelism of accelerate."
    )
    dataloader_drop_last: bool = arg(False, "Drop a last batch that is not full.")
    dataloader_num_workers: Natural = arg(
        0, "Processes that load data; 0: the training process."
    )
    dataloader_pin_memory: bool = arg(True, "Copy batches to pinned memory for a GPU.")
    dataloader_persistent_workers: bool = arg(False, "Keep workers between epochs.")
    dataloader_prefetch_factor: Count | None = arg(
        None, "Batches that each worker prefetches."
    )
    dataloader_multiprocessing_context: str | None = arg(
        None, "How workers are started.", choices=["fork", "spawn", "forkserver"]
    )
    dataloader_in_order: bool = arg(
        True, "Return batches in order even if a later one is ready first."
    )
    remove_unused_columns: bool = arg(
        True, "Drop columns that are not arguments of the model's forward."
    )
    label_names: list[str] | None = arg(None, "Names of the inputs that are labels.")
    train_sampling_strategy: str = arg(
        "random",
        "Order of the training data.",
        choices=["random", "sequential", "group_by_length", "batch_rebalance"],
    )
    length_column_name: str = arg("length", "Column with the lengths to group by.")
    ddp_find_unused_parameters: bool | None = arg(
        None, "find_unused_parameters of DistributedDataParallel."
    )
    ddp_bucket_cap_mb: Count | None = arg(
        None, "bucket_cap_mb of DistributedDataParallel."
    )
    ddp_broadcast_buffers: bool | None = arg(
        None, "broadcast_buffers of DistributedDataParallel."
    )
    ddp_static_graph: bool | None = arg(
        None, "static_graph of DistributedDataParallel."
    )
    ddp_backend: str | None = arg(
        None,
        "Backend of collectives.",
        choices=["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"],
    )
    ddp_timeout: Count = arg(1800, "Seconds before a collective fails.")
    fsdp: str | None = arg(None, "Shard the model over ranks.", nargs="?", const=True)
    fsdp_config: dict[str, Any] | str | None = arg(
        None, "Settings of sharding; a dict or a JSON file."
    )
    deepspeed: dict[str, Any] | str | None = arg(
        None, "DeepSpeed's settings; a dict or a JSON file."
    )
    debug: str | list[str] = arg("", "transformers' debugging modes.")
    skip_memory_metrics: bool = arg(True, "No memory figures among the metrics.")
    do_train: bool = arg(False, "For scripts: train.")
    do_eval: bool = arg(False, "For scripts: evaluate; on with an eval_strategy.")
    do_predict: bool = arg(False, "For scripts: predict.")
    resume_from_checkpoint: str | None = arg(
        None, "For scripts: folder to resume from."
    )
    local_rank: int = arg(-1, "Rank on this machine, set by a launcher.")
