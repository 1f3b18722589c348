"""Metrics that are logged from anywhere and collected by whoever asked: fairseq's
aggregation contexts and its `log_*` functions.

What is logged goes to every active aggregator: to "default", which always is, and to
those of the `aggregate` contexts that are open. As in fairseq they belong to the
process, not to a thread.

Source: fairseq/logging/metrics.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from ctrainer.fairseq.meters import (
    AverageMeter,
    ConcatTensorMeter,
    DerivedMeter,
    Meter,
    MetersDict,
    Scalar,
    StopwatchMeter,
    SumMeter,
    TimeMeter,
    safe_round,
)

__all__ = [
    "AverageMeter",
    "ConcatTensorMeter",
    "Meter",
    "MetersDict",
    "StopwatchMeter",
    "SumMeter",
    "TimeMeter",
    "aggregate",
    "get_active_aggregators",
    "get_meter",
    "get_meters",
    "get_smoothed_value",
    "get_smoothed_values",
    "load_state_dict",
    "log_concat_tensor",
    "log_custom",
    "log_derived",
    "log_scalar",
    "log_scalar_sum",
    "log_speed",
    "log_start_time",
    "log_stop_time",
    "reset",
    "reset_meter",
    "reset_meters",
    "safe_round",
    "state_dict",
]


class _Stack:
    """The active aggregators, outermost first; one can be entered more than once."""

    def __init__(self) -> None:
        self.active: dict[Hashable, MetersDict] = {}
        self._entered: dict[Hashable, int] = {}

    def enter(self, key: Hashable, meters: MetersDict) -> None:
        self.active[key] = meters
        self._entered[key] = self._entered.get(key, 0) + 1

    def leave(self, key: Hashable) -> None:
        self._entered[key] -= 1
        if self._entered[key] == 0:
            del self._entered[key], self.active[key]


class _Contexts:
    """The named aggregators, and the stack of those that are active."""

    def __init__(self) -> None:
        self.named: OrderedDict[str, MetersDict] = OrderedDict(default=MetersDict())
        self.stack = _Stack()
        self.stack.enter("default", self.named["default"])


_contexts = _Contexts()


def reset() -> None:
    """Forget every aggregator; contexts that are open collect nothing more."""
    global _contexts
    _contexts = _Contexts()


@contextmanager
def aggregate(name: str | None = None, new_root: bool = False) -> Iterator[MetersDict]:
    """Collect what is logged inside the block. Also a decorator.

    The context is left whatever the block raises.

    Args:
        name (str | None, default None): Under which meters are kept and continued;
            None: for the block alone.
        new_root (bool, default False): The enclosing contexts, "default" included, see
            nothing of it.

    Yields:
        The meters.

    Raises:
        ValueError: the name is "default", which is always active.
    """
    if name == "default":
        raise ValueError("the aggregator 'default' is always active; name another")
    contexts = _contexts  # after a reset() within the block others are logged into
    key: Hashable = object() if name is None else name
    meters = MetersDict()
    if name is not None:
        meters = contexts.named.setdefault(name, meters)
    outer = contexts.stack
    contexts.stack = inner = _Stack() if new_root else outer
    inner.enter(key, meters)
    try:
        yield meters
    finally:
        inner.leave(key)
        if new_root:
            contexts.stack = outer


def get_active_aggregators() -> list[MetersDict]:
    """Return the meters of the contexts that are open, "default" first."""
    return list(_contexts.stack.active.values())


def _meters(key: str, make: Callable[[], Meter], priority: int) -> Iterator[Any]:
    """The meter of that name in each active aggregator, made where there is none."""
    for meters in get_active_aggregators():
        meter = meters.get(key)
        if meter is None:
            meter = make()
            meters.add_meter(key, meter, priority)
        yield meter


def log_scalar(
    key: str,
    value: Scalar,
    weight: Scalar = 1,
    priority: int = 10,
    round: int | None = None,
) -> None:
    """Log a value for a weighted mean.

    Args:
        key (str): Name of the value.
        value (Scalar): The value.
        weight (Scalar, default 1): Times that it counts; with 0 the latest value is
            reported.
        priority (int, default 10): Low ones are reported first; the first call for a
            key decides.
        round (int | None, default None): Decimals, None for all; the first call for a
            key decides.
    """
    for meter in _meters(key, lambda: AverageMeter(round=round), priority):
        meter.update(value, weight)


def log_scalar_sum(
    key: str, value: Scalar, priority: int = 10, round: int | None = None
) -> None:
    """Log a value for a sum.

    Args:
        key (str): Name of the value.
        value (Scalar): The value.
        priority (int, default 10): Low ones are reported first.
        round (int | None, default None): Decimals, None for all.
    """
    for meter in _meters(key, lambda: SumMeter(round=round), priority):
        meter.update(value)


def log_concat_tensor(key: str, value: Any, priority: int = 10, dim: int = 0) -> None:
    """Log a tensor that is joined to those before it; reported as [].

    Args:
        key (str): Name of the value.
        value (torch.Tensor): The tensor.
        priority (int, default 10): Low ones are reported first.
        dim (int, default 0): Along which it is joined.
    """
    for meter in _meters(key, lambda: ConcatTensorMeter(dim=dim), priority):
        meter.update(value)


def log_derived(
    key: str, fn: Callable[[MetersDict], Scalar], priority: int = 20
) -> None:
    """Log a value that is computed from the other meters whenever it is read.

    It is not part of `state_dict`, so it has to be logged again after a restart.

    Args:
        key (str): Name of the value.
        fn (Callable[[MetersDict], Scalar]): (meters) -> the value.
        priority (int, default 20): Low ones are reported first.
    """
    for _ in _meters(key, lambda: DerivedMeter(fn), priority):
        pass


def log_speed(
    key: str, value: Scalar, priority: int = 30, round: int | None = None
) -> None:
    """Log events for a rate per second.

    Args:
        key (str): Name of the rate. The first call for it starts the clock, and its
            value is not counted.
        value (Scalar): Events.
        priority (int, default 30): Low ones are reported first.
        round (int | None, default None): Decimals, None for all.
    """
    for meters in get_active_aggregators():
        meter: Any = meters.get(key)
        if meter is None:
            meters.add_meter(key, TimeMeter(round=round), priority)
        else:
            meter.update(value)


def log_start_time(key: str, priority: int = 40, round: int | None = None) -> None:
    """Start a stopwatch, which `log_stop_time` reads.

    Args:
        key (str): Its name.
        priority (int, default 40): Low ones are reported first.
        round (int | None, default None): Decimals, None for all.
    """
    for meter in _meters(key, lambda: StopwatchMeter(round=round), priority):
        meter.start()


def log_stop_time(
    key: str, weight: Scalar = 0.0, prehook: Callable[[], object] | None = None
) -> None:
    """Add the seconds since `log_start_time`, where it was called.

    Args:
        key (str): The stopwatch.
        weight (Scalar, default 0.0): 0: the sum of the seconds is reported; above 0:
            their mean.
        prehook (Callable[[], object] | None, default None): Called before the clock is
            read, for instance torch.cuda.synchronize.
    """
    for meters in get_active_aggregators():
        meter: Any = meters.get(key)
        if meter is not None:
            meter.stop(weight, prehook)


def log_custom(
    new_meter_fn: Callable[[], Meter],
    key: str,
    *args: Any,
    priority: int = 50,
    **kwargs: Any,
) -> None:
    """Log with a meter of your own.

    Args:
        new_meter_fn (Callable[[], Meter]): Makes the meter.
        key (str): Name of the value.
        *args, **kwargs: Of the meter's `update`.
        priority (int, default 50): Low ones are reported first.
    """
    for meter in _meters(key, new_meter_fn, priority):
        meter.update(*args, **kwargs)


def reset_meter(name: str, key: str) -> None:
    """Reset one meter, if there is one.

    Args:
        name (str): Of the aggregator.
        key (str): Of the meter.
    """
    meter = get_meter(name, key)
    if meter is not None:
        meter.reset()


def reset_meters(name: str) -> None:
    """Reset all meters of an aggregator, if there is one.

    Args:
        name (str): Of the aggregator.
    """
    meters = get_meters(name)
    if meters is not None:
        meters.reset()


def get_meter(name: str, key: str) -> Meter | None:
    """Return a meter, or None.

    Args:
        name (str): Of the aggregator.
        key (str): Of the meter.
    """
    meters = get_meters(name)
    return None if meters is None else meters.get(key)


def get_meters(name: str) -> MetersDict | None:
    """Return the meters of an aggregator, or None.

    Args:
        name (str): Of the aggregator.
    """
    return _contexts.named.get(name)


def get_smoothed_value(name: str, key: str) -> Scalar:
    """Return one value as it is reported.

    Args:
        name (str): Of the aggregator.
        key (str): Of the meter.

    Raises:
        KeyError: nothing was logged.
    """
    return _contexts.named[name].get_smoothed_value(key)


def get_smoothed_values(name: str) -> OrderedDict[str, Scalar]:
    """Return all values as they are reported.

    Args:
        name (str): Of the aggregator.

    Raises:
        KeyError: an unknown name.
    """
    return _contexts.named[name].get_smoothed_values()


def state_dict() -> OrderedDict[str, list[tuple[int, str, str, dict[str, Any]]]]:
    """Return the state of the named aggregators, as a checkpoint keeps it."""
    return OrderedDict(
        (name, meters.state_dict()) for name, meters in _contexts.named.items()
    )


def load_state_dict(
    state_dict: dict[str, list[tuple[int, str, str, dict[str, Any]]]],
) -> None:
    """Replace aggregators.

    One that is active stays so, with the meters loaded; fairseq would continue to log
    to the old ones.

    Args:
        state_dict (dict[str, list[tuple[int, str, str, dict[str, Any]]]]): What
            state_dict() returned; other aggregators stay.

    Raises:
        ValueError: a meter cannot be loaded; nothing has changed.
    """
    loaded = {name: MetersDict() for name in state_dict}
    for name, meters in loaded.items():
        meters.load_state_dict(state_dict[name])
    for name, meters in loaded.items():
        _contexts.named.setdefault(name, MetersDict()).take_over(meters)
