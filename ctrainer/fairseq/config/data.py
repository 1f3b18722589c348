"""The groups `dataset`, `optimization` and `checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ctrainer.arguments.settings import Count, Filled, Natural, NotNegative, Range
from ctrainer.fairseq.config.base import II, FairseqDataclass, LearningRates, OrOff, opt

DatasetImpl = Literal["raw", "lazy", "cached", "mmap", "fasta", "huffman"]


@dataclass
class DatasetConfig(FairseqDataclass):
    """Which data, in which batches, validated when."""

    num_workers: Natural = opt(
        1, "Processes that load batches; 0: the training process."
    )
    skip_invalid_size_inputs_valid_test: bool = opt(
        False, "Leave out sequences that are too long or short when not training."
    )
    max_tokens: Count | None = opt(None, "Tokens of a batch at most.")
    batch_size: Count | None = opt(
        None, "Sequences of a batch at most.", argparse_alias="--max-sentences"
    )
    required_batch_size_multiple: Count = opt(
        8, "Number by which the sequences of a batch are divisible."
    )
    required_seq_len_multiple: Count = opt(
        1, "Number by which the length of a batch's sequences is divisible."
    )
    dataset_impl: DatasetImpl | None = opt(None, "Format of the data on disk.")
    data_buffer_size: Natural = opt(10, "Batches to prefetch.")
    train_subset: str = opt("train", "Subset to train on.")
    valid_subset: str = opt("valid", "Subsets to validate on, separated by commas.")
    combine_valid_subsets: bool | None = opt(
        None,
        "Validate on all subsets as one.",
        argparse_alias="--combine-val",
    )
    ignore_unused_valid_subsets: bool | None = opt(
        False, "Accept subsets for validation that valid_subset does not name."
    )
    validate_interval: Count = opt(1, "Epochs between two validations.")
    validate_interval_updates: OrOff = opt(
        0, "Updates between two validations; 0: at ends of epochs only."
    )
    validate_after_updates: Natural = opt(0, "Updates before the first validation.")
    fixed_validation_seed: int | None = opt(None, "Seed for each validation.")
    disable_validation: bool = opt(False, "Never validate.")
    max_tokens_valid: Count | None = opt(
        II("dataset.max_tokens"),
        "Tokens of a batch for validation; by default max_tokens.",
    )
    batch_size_valid: Count | None = opt(
        II("dataset.batch_size"),
        "Sequences of a batch for validation; by default batch_size.",
        argparse_alias="--max-sentences-valid",
    )
    max_valid_steps: Count | None = opt(
        None, "Batches of a validation at most.", argparse_alias="--nval"
    )
    curriculum: Natural = opt(0, "Epochs in which batches keep their order.")
    gen_subset: str = opt("test", "Subset to generate for.")
    num_shards: Count = opt(1, "Shards into which the data to generate for is split.")
    shard_id: Natural = opt(0, "Shard to generate for, below num_shards.")
    grouped_shuffling: bool = opt(
        False, "Shuffle groups of a batch a worker, so that lengths stay alike."
    )
    update_epoch_batch_itr: bool = opt(
        II("dataset.grouped_shuffling"),
        "Make the batches anew each epoch; by default as grouped_shuffling.",
    )
    update_ordered_indices_seed: bool = opt(
        False, "Add the epoch to the seed that orders the data."
    )


@dataclass
class OptimizationConfig(FairseqDataclass):
    """When to stop, and how gradients become updates."""

    max_epoch: Natural = opt(0, "Epoch after which training stops; 0: none.")
    max_update: Natural = opt(0, "Update after which training stops; 0: none.")
    stop_time_hours: NotNegative = opt(
        0, "Hours of training, those before a restart included, to stop after; 0: none."
    )
    clip_norm: Annotated[float, Range("[0, inf]")] = opt(
        0.0, "Maximum gradient norm, to which gradients are clipped; 0: no clipping."
    )
    sentence_avg: bool = opt(
        False, "Divide gradients by the sentences of a batch, not by its tokens."
    )
    update_freq: Annotated[list[Count], Filled()] = opt(
        [1], "Batches in an update, by epoch; the last one stays."
    )
    lr: LearningRates = opt(
        [0.25], "Learning rates, by epoch; the schedule decides how to use several."
    )
    stop_min_lr: Annotated[float, Range("[-1, inf)")] = opt(
        -1.0, "Learning rate at which training stops."
    )
    use_bmuf: bool = opt(False, "Synchronise models by blocks of updates (bmuf).")
    skip_remainder_batch: bool | None = opt(
        False, "Leave out the last updates of an epoch that are not full."
    )
    debug_param_names: bool = opt(False, "Nothing here reads it.")


@dataclass
class CheckpointConfig(FairseqDataclass):
    """Saving, keeping and restoring."""

    save_dir: str = opt("checkpoints", "Folder of the checkpoints.")
    restore_file: str = opt(
        "checkpoint_last.pt", "Checkpoint to resume from; a bare name is in save_dir."
    )
    continue_once: str | None = opt(
        None, "Checkpoint to resume from unless restore_file exists."
    )
    finetune_from_model: str | None = opt(
        None, "Checkpoint whose model alone is taken."
    )
    reset_dataloader: bool = opt(False, "Do not restore the position in the data.")
    reset_lr_scheduler: bool = opt(False, "Do not restore the schedule.")
    reset_meters: bool = opt(False, "Do not restore the meters.")
    reset_optimizer: bool = opt(False, "Do not restore the optimizer.")
    optimizer_overrides: str = opt(
        "{}", "Python dict of the optimizer's options to change when it is restored."
    )
    save_interval: Count = opt(1, "Epochs between two checkpoints.")
    save_interval_updates: OrOff = opt(
        0, "Updates between two checkpoints, with validation; 0: none."
    )
    keep_interval_updates: OrOff = opt(
        -1, "How many of those checkpoints are kept; -1: all."
    )
    keep_interval_updates_pattern: Annotated[int, Range("{-1} or [1, inf)")] = opt(
        -1, "Keep those whose update this number divides; -1: none for that reason."
    )
    keep_last_epochs: OrOff = opt(-1, "Checkpoints of epochs to keep; -1: all.")
    keep_best_checkpoints: OrOff = opt(
        -1, "Best checkpoints to keep; -1: the best one."
    )
    no_save: bool = opt(False, "Save nothing.")
    no_epoch_checkpoints: bool = opt(False, "Save the last and the best alone.")
    no_last_checkpoints: bool = opt(False, "Do not save the last.")
    no_save_optimizer_state: bool = opt(False, "Leave the optimizer out.")
    best_checkpoint_metric: str = opt(
        "loss", "Metric that makes a checkpoint the best."
    )
    maximize_best_checkpoint_metric: bool = opt(False, "Larger is better.")
    patience: OrOff = opt(
        -1, "Validations without improvement after which training stops; -1: never."
    )
    checkpoint_suffix: str = opt("", "Added to the names of checkpoints.")
    checkpoint_shard_count: Count = opt(1, "Files that make up a checkpoint to load.")
    load_checkpoint_on_all_dp_ranks: bool = opt(
        False, "Let every worker read the file, instead of sending it from the first."
    )
    write_checkpoints_asynchronously: bool = opt(
        False, "Write in the background.", argparse_alias="--save-async"
    )
    model_parallel_size: int = II("common.model_parallel_size")
