"""The bars behind `progress_bar`: how each format writes its lines."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from importlib import import_module
from numbers import Number
from typing import Any, cast

from ctrainer.fairseq._tensors import is_tensor
from ctrainer.fairseq.meters import AverageMeter, StopwatchMeter, TimeMeter

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
