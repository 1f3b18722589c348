"""Progress in fairseq's formats: lines of JSON, plain lines, tqdm's bar or nothing.

A bar wraps the iterator of batches; `log` reports while it runs, every `log_interval`
steps, and `print` at the end of an epoch. Lines go to this module's logger under the
name of their tag, such as "train_inner".

Source: fairseq/logging/progress_bar.py.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from ctrainer.fairseq._bars import (
    BaseProgressBar,
    JsonProgressBar,
    NoopProgressBar,
    SimpleProgressBar,
    TqdmProgressBar,
    format_stat,
    logger,
    rename_logger,
)
from ctrainer.fairseq.trackers import (
    TensorboardProgressBarWrapper,
    WandBProgressBarWrapper,
)

__all__ = [
    "BaseProgressBar",
    "JsonProgressBar",
    "NoopProgressBar",
    "SimpleProgressBar",
    "TensorboardProgressBarWrapper",
    "TqdmProgressBar",
    "WandBProgressBarWrapper",
    "build_progress_bar",
    "format_stat",
    "progress_bar",
    "rename_logger",
    "training_progress_bar",
]


def progress_bar(
    iterator: Iterable[Any],
    log_format: str | None = None,
    log_interval: int | None = 100,
    log_file: str | None = None,
    epoch: int | None = None,
    prefix: str | None = None,
    aim_repo: str | None = None,
    aim_run_hash: str | None = None,
    aim_param_checkpoint_dir: str | None = None,
    tensorboard_logdir: str | None = None,
    default_log_format: str = "tqdm",
    wandb_project: str | None = None,
    wandb_run_name: str | None = None,
    azureml_logging: bool | None = False,
) -> BaseProgressBar:
    """The bar for `log_format`: json, simple, tqdm or none; None: `default_log_format`.

    tqdm becomes simple where standard error is not a terminal. Lines are copied to
    `log_file`. With `tensorboard_logdir` or `wandb_project` the numbers go there too.

    Raises ValueError for another format and for Aim and Azure ML, which are not
    served; ImportError, saying what to install, for a package that is missing.
    """
    if aim_repo or azureml_logging:
        raise ValueError(
            "aim_repo and azureml_logging have no tracker here; use tensorboard_logdir "
            "or wandb_project"
        )
    bar = _bar(iterator, log_format or default_log_format, log_interval, epoch, prefix)
    if tensorboard_logdir:
        bar = TensorboardProgressBarWrapper(bar, tensorboard_logdir)
    if wandb_project:
        bar = WandBProgressBarWrapper(bar, wandb_project, run_name=wandb_run_name)
    if log_file is not None:
        _copy_lines_to(log_file)
    return bar


def training_progress_bar(
    config: Any,
    iterator: Iterable[Any],
    epoch: int,
    prefix: str | None = None,
    is_master: bool = True,
) -> BaseProgressBar:
    """The bar that fairseq's programs show for a FairseqConfig.

    Lines of the format "simple" take the place of tqdm's bar with no_progress_bar. Only
    the master has trackers; its run of Weights & Biases is called by WANDB_NAME or else
    by the last part of save_dir.
    """
    common, save_dir = config.common, config.checkpoint.save_dir
    run_name = os.environ.get("WANDB_NAME", os.path.basename(save_dir))
    return progress_bar(
        iterator,
        log_format=common.log_format,
        log_interval=common.log_interval,
        log_file=common.log_file,
        epoch=epoch,
        prefix=prefix,
        aim_repo=common.aim_repo if is_master else None,
        tensorboard_logdir=common.tensorboard_logdir if is_master else None,
        default_log_format="simple" if common.no_progress_bar else "tqdm",
        wandb_project=common.wandb_project if is_master else None,
        wandb_run_name=run_name,
        azureml_logging=common.azureml_logging if is_master else False,
    )


def _bar(
    iterator: Iterable[Any],
    log_format: str,
    log_interval: int | None,
    epoch: int | None,
    prefix: str | None,
) -> BaseProgressBar:
    if log_format == "tqdm" and not sys.stderr.isatty():
        log_format = "simple"
    if log_format == "json":
        return JsonProgressBar(iterator, epoch, prefix, log_interval)
    if log_format == "simple":
        return SimpleProgressBar(iterator, epoch, prefix, log_interval)
    if log_format == "tqdm":
        return TqdmProgressBar(iterator, epoch, prefix)
    if log_format == "none":
        return NoopProgressBar(iterator, epoch, prefix)
    raise ValueError(
        f"Unknown log format: {log_format}; choose json, none, simple or tqdm"
    )


def _copy_lines_to(log_file: str) -> None:
    """Let the lines go to the file too: once, however many bars name it."""
    path = os.path.abspath(log_file)
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == path:
            return
    logger.addHandler(logging.FileHandler(filename=log_file))


def build_progress_bar(
    args: Any,
    iterator: Iterable[Any],
    epoch: int | None = None,
    prefix: str | None = None,
    default: str = "tqdm",
    no_progress_bar: str = "none",
) -> BaseProgressBar:
    """The bar for options of a common group, a flat namespace or the like.

    Only rank 0 writes for TensorBoard.
    """
    if getattr(args, "no_progress_bar", False):
        default = no_progress_bar
    is_first = getattr(args, "distributed_rank", 0) == 0
    return progress_bar(
        iterator,
        log_format=args.log_format,
        log_interval=args.log_interval,
        epoch=epoch,
        prefix=prefix,
        tensorboard_logdir=(
            getattr(args, "tensorboard_logdir", None) if is_first else None
        ),
        default_log_format=default,
    )
