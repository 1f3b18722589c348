"""Bars around a bar that pass the numbers on: to TensorBoard, to Weights & Biases.

Each package is imported when its wrapper is made, and refused with what to install
where it is missing; fairseq goes on without.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from numbers import Number
from typing import Any

from ctrainer.adapters.tensorboard import summary_writer_class
from ctrainer.fairseq._bars import BaseProgressBar, Stats, Step, Tag
from ctrainer.fairseq._tensors import is_tensor
from ctrainer.fairseq.meters import AverageMeter


class _TrackerBar(BaseProgressBar):
    """Tracks the numbers of each report, then lets the bar inside report them."""

    def __init__(self, wrapped_bar: BaseProgressBar) -> None:
        super().__init__(wrapped_bar, wrapped_bar.epoch)
        self.wrapped_bar = wrapped_bar
        self.prefix = wrapped_bar.prefix

    def __exit__(self, *exc: object) -> None:
        self.wrapped_bar.__exit__(*exc)

    def log(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        self._track(_numbers(stats), tag, _step(stats, step))
        self.wrapped_bar.log(stats, tag=tag, step=step)

    def print(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        self._track(_numbers(stats), tag, _step(stats, step))
        self.wrapped_bar.print(stats, tag=tag, step=step)

    def update_config(self, config: Mapping[str, Any]) -> None:
        self.wrapped_bar.update_config(config)

    def _track(self, numbers: dict[str, Any], tag: Tag, step: Any) -> None:
        raise NotImplementedError


def _step(stats: Stats, step: Step) -> Any:
    if step is not None:
        return step
    if "num_updates" not in stats:
        raise ValueError("a tracker needs a step: pass step=, or stats['num_updates']")
    return stats["num_updates"]


def _numbers(stats: Stats) -> dict[str, Any]:
    """The stats that are numbers; of a mean the latest value. num_updates is the axis
    and not among them."""
    found = {}
    for name in stats:
        value = stats[name]
        if isinstance(value, AverageMeter):
            value = value.val
        elif is_tensor(value) and value.numel() == 1:
            value = value.item()
        if name != "num_updates" and isinstance(value, Number):
            found[name] = value
    return found


# One writer a folder and process: bars come and go with the epochs.
_writers: dict[str, Any] = {}


def _close_writers() -> None:
    while _writers:
        _writers.popitem()[1].close()


atexit.register(_close_writers)

# A child keeps them as they are: to close one is to wait for a thread of the parent.
_of_parent: list[dict[str, Any]] = []


def _after_fork() -> None:
    _of_parent.append(dict(_writers))
    _writers.clear()


os.register_at_fork(after_in_child=_after_fork)


class TensorboardProgressBarWrapper(_TrackerBar):
    """Writes events for TensorBoard, those of each tag into its own folder."""

    def __init__(self, wrapped_bar: BaseProgressBar, tensorboard_logdir: str) -> None:
        super().__init__(wrapped_bar)
        self.tensorboard_logdir = tensorboard_logdir
        self._writer_class = summary_writer_class()

    def _writer(self, tag: str) -> Any:
        folder = os.path.join(self.tensorboard_logdir, tag)
        if folder not in _writers:
            _writers[folder] = self._writer_class(folder)
            _writers[folder].add_text("sys.argv", " ".join(sys.argv))
        return _writers[folder]

    def _track(self, numbers: dict[str, Any], tag: Tag, step: Any) -> None:
        writer = self._writer(tag or "")
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()


class WandBProgressBarWrapper(_TrackerBar):
    """Logs to one run of Weights & Biases, under "tag/name"."""

    def __init__(
        self,
        wrapped_bar: BaseProgressBar,
        wandb_project: str,
        run_name: str | None = None,
    ) -> None:
        super().__init__(wrapped_bar)
        try:
            self._wandb = import_module("wandb")
        except ImportError:
            raise ImportError("wandb_project needs wandb: pip install wandb") from None
        self._wandb.init(project=wandb_project, reinit=False, name=run_name)

    def update_config(self, config: Mapping[str, Any]) -> None:
        self._wandb.config.update(config)
        super().update_config(config)

    def _track(self, numbers: dict[str, Any], tag: Tag, step: Any) -> None:
        prefix = "" if tag is None else f"{tag}/"
        named = {prefix + name: value for name, value in numbers.items()}
        if named:
            self._wandb.log(named, step=step)
