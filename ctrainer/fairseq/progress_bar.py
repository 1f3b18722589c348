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
    """Return a value as it is reported.

    Numbers in six digits, a mean in three decimals, rates and durations whole, a tensor
    as a list, anything else as it is.

    Args:
        stat: A number, a meter or a tensor.
    """
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
    """Let a logger's records carry another name inside the block.

    Args:
        named (logging.Logger): The logger.
        new_name (str | None): The other name; None: its own.

    Yields:
        The logger.
    """
    old_name = named.name
    named.name = old_name if new_name is None else new_name
    try:
        yield named
    finally:
        named.name = old_name


class BaseProgressBar:
    """The base of the bars: the prefix "epoch 001 | ...", and how stats are written.

    Args:
        iterable (Iterable[Any]): The batches.
        epoch (int | None, default None): From 1; None: none is shown.
        prefix (str | None, default None): After the epoch.
        log_interval (int | None, default 1000): Batches between two reports, of bars
            that write lines.

    Args of every method:
        stats (dict): Numbers and meters by name.
        tag (str | None): Of what they are, such as "train".
        step (int | None): Update or batch.
        config (Mapping): The run's configuration.

    Example:
        >>> from ctrainer.fairseq.progress_bar import NoopProgressBar
        >>> list(NoopProgressBar([1, 2], epoch=1))
        [1, 2]
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        epoch: int | None = None,
        prefix: str | None = None,
        log_interval: int | None = 1000,
    ) -> None:
        self.iterable = iterable
        self.log_interval = log_interval
        self.n: int = getattr(iterable, "n", 0)
        self.epoch = epoch
        parts = [] if epoch is None else [f"epoch {epoch:03d}"]
        self.prefix = " | ".join(parts if prefix is None else [*parts, prefix])

    def __len__(self) -> int:
        return len(cast(Sized, self.iterable))

    def __enter__(self) -> BaseProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        """Exceptions pass through."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def log(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        """Report stats on the way, where this bar does at all.

        Args:
            stats (Stats): Numbers and meters by name.
            tag (Tag, default None): Of what they are, such as "train".
            step (Step, default None): Update or batch.
        """

    def print(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        """Report stats at the end of an epoch, where this bar does at all.

        Args:
            stats (Stats): Numbers and meters by name.
            tag (Tag, default None): Of what they are, such as "train".
            step (Step, default None): Update or batch.
        """

    def update_config(self, config: Mapping[str, Any]) -> None:
        """Pass the configuration to the tracker behind the bar, where there is one.

        Args:
            config (Mapping[str, Any]): The run's.
        """

    def _line(self, stats: Stats) -> str:
        """The line of an epoch's end: "prefix | name value | name value"."""
        parts = [f"{name} {text.strip()}" for name, text in _texts(stats).items()]
        return f"{self.prefix} | {' | '.join(parts)}"


class NoopProgressBar(BaseProgressBar):
    """Reports nothing."""


def _texts(stats: Stats) -> dict[str, str]:
    return {name: str(format_stat(stats[name])) for name in stats}


def _write(tag: str | None, text: str) -> None:
    with rename_logger(logger, tag):
        logger.info("%s", text)


class _LineProgressBar(BaseProgressBar):
    """A line every `log_interval` steps; a step not given is the batch's index."""

    i: int | None = None  # the index of the batch that was taken last
    size: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.size = len(self)
        for i, batch in enumerate(self.iterable, start=self.n):
            self.i = i
            yield batch

    def log(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        step, every = step or self.i or 0, self.log_interval
        if step > 0 and every is not None and step % every == 0:
            _write(tag, self._progress(stats))

    def print(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        _write(tag, self._line(stats))

    def _progress(self, stats: Stats) -> str:
        """The line of a report on the way."""
        raise NotImplementedError

    def _position(self) -> tuple[int, int]:
        """How many batches have been taken, and of how many."""
        taken = self.n if self.i is None else self.i + 1
        return taken, len(self) if self.size is None else self.size


class JsonProgressBar(_LineProgressBar):
    """A JSON object a line; `update` in it is the epoch with its fraction."""

    def print(self, stats: Stats, tag: Tag = None, step: Step = None) -> None:
        if tag is not None:
            stats = {f"{tag}_{name}": stats[name] for name in stats}
        super().print(stats, tag)

    def _progress(self, stats: Stats) -> str:
        if self.epoch is None:
            return self._line(stats)
        taken, size = self._position()
        update = round(self.epoch - 1 + taken / float(size or 1), 3)
        return self._line(stats, {"update": update})

    def _line(self, stats: Stats, more: Stats | None = None) -> str:
        start = {} if self.epoch is None else {"epoch": self.epoch, **(more or {})}
        return json.dumps({**start, **{k: format_stat(stats[k]) for k in stats}})


class SimpleProgressBar(_LineProgressBar):
    """A plain line, for output that is not a terminal."""

    def _progress(self, stats: Stats) -> str:
        taken, size = self._position()
        parts = [f"{name}={text.strip()}" for name, text in _texts(stats).items()]
        return f"{self.prefix}:  {taken:5d} / {size:d} {', '.join(parts)}"


class TqdmProgressBar(BaseProgressBar):
    """tqdm's bar, with the stats behind it; quiet where INFO is not logged.

    Args:
        iterable (Iterable[Any]): The batches.
        *options: Of the other bars: epoch, prefix and log_interval.
        **named: The same by name.
    """

    def __init__(self, iterable: Iterable[Any], *options: Any, **named: Any) -> None:
        super().__init__(iterable, *options, **named)
        instead = "; or choose json, simple or none"
        self.tqdm = _imported("tqdm", "log_format='tqdm'", instead).tqdm(
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


def _imported(package: str, option: str, instead: str = "") -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ImportError(
            f"{option} needs {package}: pip install {package}{instead}"
        ) from None


# Bars around a bar that pass the numbers on: to TensorBoard, to Weights & Biases.
#
# Each package is imported when its wrapper is made, and rejected with what to install
# where it is missing; fairseq continues without.


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
    """Writes events for TensorBoard, those of each tag into its own folder.

    Args:
        wrapped_bar (BaseProgressBar): The bar that reports, too.
        tensorboard_logdir (str): The folder.
    """

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
    """Logs to one run of Weights & Biases, under "tag/name".

    Args:
        wrapped_bar (BaseProgressBar): The bar that reports, too.
        wandb_project (str): The project.
        run_name (str | None, default None): Of the run; None: wandb's choice.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(
        self,
        wrapped_bar: BaseProgressBar,
        wandb_project: str,
        run_name: str | None = None,
    ) -> None:
        super().__init__(wrapped_bar)
        self._wandb = _imported("wandb", "wandb_project")
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
    """Return the bar for a format.

    tqdm becomes simple where standard error is not a terminal.

    Args:
        iterator (Iterable[Any]): The batches.
        log_format (str | None, default None): json, simple, tqdm or none; None:
            default_log_format.
        log_interval (int | None, default 100): Batches between two lines.
        log_file (str | None, default None): Lines are copied to this file.
        epoch (int | None, default None): From 1.
        prefix (str | None, default None): After the epoch.
        aim_repo, aim_run_hash, aim_param_checkpoint_dir (str | None, default None): Of
            Aim, which is not supported: leave them out.
        tensorboard_logdir (str | None, default None): Numbers are written for
            TensorBoard there, too.
        default_log_format (str, default 'tqdm'): See log_format.
        wandb_project (str | None, default None): Numbers go to this project, too.
        wandb_run_name (str | None, default None): Of the run there.
        azureml_logging (bool | None, default False): True is not supported.

    Raises:
        ValueError: another format, Aim or Azure ML.
        ImportError: a package is missing; the message says what to install.
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
    """Return the bar that fairseq's programs show for a FairseqConfig.

    Lines of the format "simple" take the place of tqdm's bar with no_progress_bar. Only
    the master has trackers; its run of Weights & Biases is called by WANDB_NAME or else
    by the last part of save_dir.

    Args:
        config: A FairseqConfig.
        iterator (Iterable[Any]): The batches.
        epoch (int): From 1.
        prefix (str | None, default None): After the epoch.
        is_master (bool, default True): This is the first rank.

    Example:
        >>> from ctrainer.fairseq import as_config, training_progress_bar
        >>> cfg = as_config({"common": {"log_format": "none"}})
        >>> list(training_progress_bar(cfg, [1, 2], epoch=1))
        [1, 2]
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
    if log_format not in _BARS:
        raise ValueError(f"Unknown log format: {log_format}; choose {', '.join(_BARS)}")
    return _BARS[log_format](iterator, epoch, prefix, log_interval)


_BARS: dict[str, type[BaseProgressBar]] = {
    "json": JsonProgressBar,
    "none": NoopProgressBar,
    "simple": SimpleProgressBar,
    "tqdm": TqdmProgressBar,
}


def _copy_lines_to(log_file: str) -> None:
    """Let the lines go to the file too: once, however many bars name it."""
    path = os.path.abspath(log_file)
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == path:
            return
    logger.addHandler(logging.FileHandler(filename=log_file))
