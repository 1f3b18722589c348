"""Lines of the log in transformers' words, which scripts, tests and people look for.

They go to transformers' loggers where transformers is loaded, whose handlers and levels
its users set, and else to ctrainer's. Source of the texts: transformers 5.17.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Iterable
from typing import Any


def _logger(module: str = "trainer") -> logging.Logger:
    loaded = "transformers" in sys.modules
    return logging.getLogger(f"{'transformers' if loaded else 'ctrainer'}.{module}")


def _info(text: str) -> None:
    _logger().info(text)


def _warn(text: str) -> None:
    _logger().warning(text)


def running(trainer: Any, run: Any, examples: int, total: int) -> None:
    """What a run is about to do.

    examples: rows of the data; total: rows of an update.
    """
    if not _logger().isEnabledFor(logging.INFO):
        return
    args = trainer.args
    lines = [
        "***** Running training *****",
        f"  Num examples = {examples:,}",
        f"  Num Epochs = {run.epochs:,}",
        f"  Num update steps per epoch = {run.updates_in_epoch:,}",
        f"  Instantaneous batch size per device = {args.per_device_train_batch_size:,}",
        "  Total train batch size (w. parallel, distributed & accumulation) = "
        f"{total:,}",
        f"  Gradient Accumulation steps = {args.gradient_accumulation_steps}",
        f"  Total optimization steps = {run.max_steps:,}",
        "  Number of trainable parameters = "
        f"{trainer.get_num_trainable_parameters():,}",
    ]
    if run.checkpoint is not None:
        lines.append(
            f"  Resuming training from checkpoint with epoch {run.epoch} and global "
            f"step {trainer.state.global_step}"
        )
    for line in lines:
        _info(line)


def completed() -> None:
    _info(
        "\n\nTraining completed. Do not forget to share your model on "
        "huggingface.co/models =)\n\n"
    )


def evaluating(description: str, examples: str, batch_size: int) -> None:
    _info(f"\n***** Running {description} *****")
    _info(f"  Num examples{examples}")
    _info(f"  Batch size = {batch_size}")


def overridden_epochs() -> None:
    _info("max_steps is given, it will override any value given in num_train_epochs")


def loading_best(folder: str, metric: Any) -> None:
    _info(f"Loading best model from {folder} (score: {metric}).")


def deleting(folder: str) -> None:
    _info(f"Deleting older checkpoint [{folder}] due to args.save_total_limit")


def uploading() -> None:
    _info(
        "Waiting for the current checkpoint push to be finished, this might take a "
        "couple of minutes."
    )


def no_best(folder: str) -> None:
    _warn(
        f"The best checkpoint {folder} recorded in the resumed state does not exist "
        "anymore. Ignoring it for this run."
    )


def differing_arguments(args: Any, state: Any) -> None:
    """Warn of arguments that differ from those that a checkpoint's state has."""
    saved_size, devices = state.train_batch_size, max(1, getattr(args, "n_gpu", 1))
    pairs = [
        (name, getattr(args, name, None), getattr(state, name, None))
        for name in ("logging_steps", "eval_steps", "save_steps")
    ]
    pairs.append(
        (
            "per_device_train_batch_size",
            args.per_device_train_batch_size,
            None if saved_size is None else saved_size // devices,
        )
    )
    differing = [
        f"\n\t{name}: {own} (from args) != {saved} (from trainer_state.json)"
        for name, own, saved in pairs
        if None not in (own, saved) and own != saved
    ]
    if differing:
        _warn(
            "Warning: The following arguments do not match the ones in the "
            "`trainer_state.json` within the checkpoint directory: "
            + "".join(differing)
        )


def missing_callbacks(names: Iterable[str]) -> None:
    """Warn of callbacks whose state a checkpoint has, and that the trainer has not."""
    found = ", ".join(names)
    if found:
        _warn(
            "Checkpoint included callbacks not included in current configuration. "
            f"Ignoring. ({found})"
        )


def added_twice(cls: type, names: str) -> None:
    _logger("trainer_callback").warning(
        f"You are adding a {cls} to the callbacks of this Trainer, but there is "
        f"already one. The current list of callbacks is\n:{names}"
    )


def loaded_keys(result: Any) -> None:
    """Warn of weights that a checkpoint lacks or has in addition."""
    for kind in ("missing", "unexpected"):
        keys = getattr(result, f"{kind}_keys", None)
        if keys:
            _warn(f"There were {kind} keys in the checkpoint model loaded: {keys}.")


def aligned_tokens(changed: dict[str, Any]) -> None:
    _warn(
        "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config "
        "and generation config. The model config and generation config were aligned "
        "accordingly, being updated with the tokenizer's values. Updated tokens: "
        f"{changed}."
    )


@functools.cache
def _counting_padding(logger: logging.Logger) -> None:
    logger.warning(
        "Could not determine method to count non-padding tokens, falling back to "
        "counting all tokens."
    )


def counting_padding() -> None:
    """Once in a process."""
    _counting_padding(_logger())


def no_smoothing() -> None:
    warnings.warn(
        "Label smoothing is not compatible with multi-label classification. Disabling "
        "label smoothing for this training run.",
        UserWarning,
        stacklevel=6,
    )
