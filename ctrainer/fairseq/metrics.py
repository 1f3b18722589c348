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
    "reset_time_meters",
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

    def use(self, stack: _Stack) -> None:
        """Log into that stack from now on; after a reset() others are logged into."""
        self.stack = stack


_contexts = _Contexts()


def reset() -> None:
    """Forget every aggregator; contexts that are open collect nothing more."""
    global _contexts
    _contexts = _Contexts()


@contextmanager
def aggregate(name: str | None = None, new_root: bool = False) -> Iterator[MetersDict]:
    """Collect what is logged inside, under `name` or, unnamed, for the block alone.

    A name that was used before goes on with its meters. With `new_root` the enclosing
    contexts, "default" included, see nothing of it. Also a decorator. The context is
    left whatever the block raises.

    Raises ValueError for the name "default", which is always active.
    """
    if name == "default":
        raise ValueError("the aggregator 'default' is always active; name another")
    contexts = _contexts
    key: Hashable = object() if name is None else name
    meters = MetersDict()
    if name is not None:
        meters = contexts.named.setdefault(name, meters)
    outer = contexts.stack
    inner = _Stack() if new_root else outer
    inner.enter(key, meters)
    contexts.use(inner)
    try:
        yield meters
    finally:
        inner.leave(key)
        if new_root:
            contexts.use(outer)


def get_active_aggregators() -> list[MetersDict]:
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
    """Log `value` for a mean in which it counts `weight` times.

    With weight 0 the latest value is what is reported. Low priorities are reported
    first; `round` is the number of decimals, None for all. Both are taken from the
    first call for a key.
    """
    for meter in _meters(key, lambda: AverageMeter(round=round), priority):
        meter.update(value, weight)


def log_scalar_sum(
    key: str, value: Scalar, priority: int = 10, round: int | None = None
) -> None:
    """Log `value` for a sum."""
    for meter in _meters(key, lambda: SumMeter(round=round), priority):
        meter.update(value)


def log_concat_tensor(key: str, value: Any, priority: int = 10, dim: int = 0) -> None:
    """Log a tensor that is joined to those before it along `dim`; reported as []."""
    for meter in _meters(key, lambda: ConcatTensorMeter(dim=dim), priority):
        meter.update(value)


def log_derived(
    key: str, fn: Callable[[MetersDict], Scalar], priority: int = 20
) -> None:
    """Log a value that `fn` computes from the other meters whenever it is read.

    It is not part of `state_dict`, so it has to be logged again after a restart.
    """
    for _ in _meters(key, lambda: DerivedMeter(fn), priority):
        pass


def log_speed(
    key: str, value: Scalar, priority: int = 30, round: int | None = None
) -> None:
    """Log `value` for a rate per second.

    The first call for a key starts the clock, and its value is not counted.
    """
    for meters in get_active_aggregators():
        meter: Any = meters.get(key)
        if meter is None:
            meters.add_meter(key, TimeMeter(round=round), priority)
        else:
            meter.update(value)


def log_start_time(key: str, priority: int = 40, round: int | None = None) -> None:
    """Start a stopwatch, which `log_stop_time` reads."""
    for meter in _meters(key, lambda: StopwatchMeter(round=round), priority):
        meter.start()


def log_stop_time(
    key: str, weight: Scalar = 0.0, prehook: Callable[[], object] | None = None
) -> None:
    """Add the seconds since `log_start_time`, where it was called.

    Their sum is reported, or with a weight above 0 their mean. `prehook` is called
    before the clock is read, for instance torch.cuda.synchronize.
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
    """Log with a meter of your own, made by `new_meter_fn`; further arguments go to
    its `update`."""
    for meter in _meters(key, new_meter_fn, priority):
        meter.update(*args, **kwargs)


def reset_meter(name: str, key: str) -> None:
    """Reset one meter of the aggregator `name`, if there is one."""
    meter = get_meter(name, key)
    if meter is not None:
        meter.reset()


def reset_meters(name: str) -> None:
    """Reset all meters of the aggregator `name`, if there is one."""
    meters = get_meters(name)
    if meters is not None:
        meters.reset()


def reset_time_meters(name: str = "default") -> None:
    """Start the clocks of the rates of `name` anew, as a restart should: otherwise they
    count the time and the events of the process that wrote the checkpoint."""
    for meter in (get_meters(name) or {}).values():
        if isinstance(meter, TimeMeter):
            meter.reset()


def get_meter(name: str, key: str) -> Meter | None:
    """The meter `key` of the aggregator `name`, or None."""
    meters = get_meters(name)
    return None if meters is None else meters.get(key)


def get_meters(name: str) -> MetersDict | None:
    """The meters of the aggregator `name`, or None."""
    return _contexts.named.get(name)


def get_smoothed_value(name: str, key: str) -> Scalar:
    """One value as it is reported. Raises KeyError where nothing was logged."""
    return _contexts.named[name].get_smoothed_value(key)


def get_smoothed_values(name: str) -> OrderedDict[str, Scalar]:
    """All values as they are reported. Raises KeyError for an unknown name."""
    return _contexts.named[name].get_smoothed_values()


def state_dict() -> OrderedDict[str, list[tuple[int, str, str, dict[str, Any]]]]:
    """The state of the named aggregators, as a checkpoint keeps it."""
    return OrderedDict(
        (name, meters.state_dict()) for name, meters in _contexts.named.items()
    )


def load_state_dict(
    state_dict: dict[str, list[tuple[int, str, str, dict[str, Any]]]],
) -> None:
    """Replace the aggregators that `state_dict` names.

    One that is active stays so, with the meters loaded; fairseq would go on logging to
    the old ones. If a meter cannot be loaded, ValueError, and nothing has changed.
    """
    loaded = {name: MetersDict() for name in state_dict}
    for name, meters in loaded.items():
        meters.load_state_dict(state_dict[name])
    for name, meters in loaded.items():
        _contexts.named.setdefault(name, MetersDict()).take_over(meters)
