"""Progress in fairseq's formats: lines of JSON, plain lines, tqdm's bar or nothing.

A bar wraps the iterator of batches; `log` reports while it runs, every `log_interval`
steps, and `print` at the end of an epoch. Lines go to this module's logger under the
name of their tag, such as "train_inner".

Source: fairseq/logging/progress_bar.py.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from importlib import import_module
from numbers import Number
from typing import Any, cast

from ctrainer.adapters.tensorboard import summary_writer_class
from ctrainer.fairseq.meters import AverageMeter, StopwatchMeter, TimeMeter, is_tensor

# The bars behind `progress_bar`: how each format writes its lines.


logger = logging.getLogger("ctrainer.fairseq.progress_bar")

Stats = Mapping[str, Any]
Tag = str | None
Step = int | None


def format_stat(stat: Any) -> Any:
    """`stat` as it is reported: numbers in six digits, a mean in three decimals, rates
    and durations whole, a tensor as a list, anything else as it is."""
    if isinstance(stat, Number):
        return f"{stat:g}"
    if isinstance(stat, AverageMeter):
        return f"{stat.avg:.3f}"
    if isinstance(stat, TimeMeter):
        return f"{round(stat.avg):g}"
    if isinstance(stat, StopwatchMeter):
        return f"{round(stat.sum):g}"
    return stat.tolist() if is_tensor(stat) else stat


@contextmanager
def rename_logger(
    named: logging.Logger, new_name: str | None
) -> Iterator[logging.Logger]:
    """Let the records of `named` carry `new_name`, unless None, inside the block."""
    old_name = named.name
    named.name = old_name if new_name is None else new_name
    try:
        yield named
    finally:
        named.name = old_name


class BaseProgressBar:
    """What all bars share: the prefix "epoch 001 | ...", and how stats are written."""

    def __init__(
        self,
        iterable: Iterable[Any],
        epoch: int | None = None,
        prefix: str | None = None,
    ) -> None:
        self.iterable = iterable
        self.n: int = getattr(iterable, "n", 0)
        self.epoch = epoch
        parts = [] if epoch is None else [f"epoch {epoch:03d}"]
        self.prefix = " | ".join(parts if prefix is None else [*parts, prefix])

    def __len__(self) -> int:
        return len(cast(Sized, self.iterable))

    def __enter__(self) -> BaseProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        """Whatever was raised goes on."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def log(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        """Report `stats` on the way, where this bar does at all."""

    def print(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        """Report `stats` at the end of an epoch, where this bar does at all."""

    def update_config(self, config: Mapping[str, Any]) -> None:
        """Tell the tracker behind the bar, where there is one, the configuration."""

    def _line(self, stats: Stats) -> str:
        """The line of an epoch's end: "prefix | name value | name value"."""
        parts = [f"{name} {text.strip()}" for name, text in _texts(stats).items()]
        return f"{self.prefix} | {' | '.join(parts)}"


class NoopProgressBar(BaseProgressBar):
    """Reports nothing."""


def _texts(stats: Stats) -> OrderedDict[str, str]:
    return OrderedDict((name, str(format_stat(stats[name]))) for name in stats)


def _write(tag: str | None, text: str) -> None:
    with rename_logger(logger, tag):
        logger.info("%s", text)


class _LineProgressBar(BaseProgressBar):
    """A line every `log_interval` steps; a step not given is the batch's index."""

    def __init__(
        self,
        iterable: Iterable[Any],
        epoch: int | None = None,
        prefix: str | None = None,
        log_interval: int | None = 1000,
    ) -> None:
        super().__init__(iterable, epoch, prefix)
        self.log_interval = log_interval
        self.i: int | None = None  # the index of the batch that was taken last
        self.size: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.size = len(self)
        for i, batch in enumerate(self.iterable, start=self.n):
            self.i = i
            yield batch

    def _is_due(self, step: int | None) -> bool:
        step = step or self.i or 0
        return (
            step > 0
            and self.log_interval is not None
            and not (step % self.log_interval)
        )

    def _position(self) -> tuple[int, int]:
        """How many batches have been taken, and of how many."""
        taken = self.n if self.i is None else self.i + 1
        return taken, len(self) if self.size is None else self.size


class JsonProgressBar(_LineProgressBar):
    """A JSON object a line; `update` in it is the epoch with its fraction."""

    def log(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        if not self._is_due(step):
            return
        update = None
        if self.epoch is not None:
            taken, size = self._position()
            update = round(self.epoch - 1 + taken / float(size or 1), 3)
        _write(tag, self._json(stats, update))

    def print(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        if tag is not None:
            stats = OrderedDict((f"{tag}_{name}", stats[name]) for name in stats)
        _write(tag, self._json(stats))

    def _json(self, stats: Stats, update: float | None = None) -> str:
        line: OrderedDict[str, Any] = OrderedDict()
        if self.epoch is not None:
            line["epoch"] = self.epoch
        if update is not None:
            line["update"] = update
        line.update((name, format_stat(stats[name])) for name in stats)
        return json.dumps(line)


class SimpleProgressBar(_LineProgressBar):
    """A plain line, for output that is not a terminal."""

    def log(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        if not self._is_due(step):
            return
        taken, size = self._position()
        parts = [f"{name}={text.strip()}" for name, text in _texts(stats).items()]
        _write(tag, f"{self.prefix}:  {taken:5d} / {size:d} {', '.join(parts)}")

    def print(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        _write(tag, self._line(stats))


class TqdmProgressBar(BaseProgressBar):
    """tqdm's bar, with the stats behind it; quiet where INFO is not logged."""

    def __init__(
        self,
        iterable: Iterable[Any],
        epoch: int | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(iterable, epoch, prefix)
        self.tqdm = _tqdm_class()(
            iterable,
            self.prefix,
            leave=False,
            disable=logger.getEffectiveLevel() > logging.INFO,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tqdm)

    def log(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        self.tqdm.set_postfix(_texts(stats), refresh=False)

    def print(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        _write(tag, self._line(stats))


def _tqdm_class() -> Any:
    try:
        return import_module("tqdm").tqdm
    except ImportError:
        raise ImportError(
            "log_format='tqdm' needs tqdm: pip install tqdm; or choose json, simple or "
            "none"
        ) from None


# Bars around a bar that pass the numbers on: to TensorBoard, to Weights & Biases.
#
# Each package is imported when its wrapper is made, and rejected with what to install
# where it is missing; fairseq goes on without.


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
