"""Meters: running averages, sums, rates and durations under fairseq's names, with its
rounding and its state, and the dictionary that orders them by priority.

Source: fairseq/logging/meters.py. Values may be numbers, NumPy scalars or tensors of
one element; tensors stay where they are until a smoothed value is read.
"""

from __future__ import annotations

import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

# What the metrics need to know of torch, which they never import themselves: a value
# can only be a tensor where somebody else has.


# A number, an array or a tensor of one element.
Scalar: TypeAlias = Any


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_tensor(value)


def type_as(total: Scalar, value: Scalar) -> Scalar:
    """`total` on the device and in the dtype of `value`, where both are tensors."""
    if isinstance(total, (int, float)):  # nearly always: spare the look at torch
        return total
    return total.to(value) if is_tensor(total) and is_tensor(value) else total


__all__ = [
    "AverageMeter",
    "ConcatTensorMeter",
    "Meter",
    "MetersDict",
    "StopwatchMeter",
    "SumMeter",
    "TimeMeter",
    "safe_round",
]

State = dict[str, Any]


class Meter:
    """The interface of every meter; subclass it for `metrics.log_custom`.

    A checkpoint names the class and makes it anew without arguments.

    Args of every method:
        state_dict (dict): What state_dict() returned.

    Example:
        >>> from ctrainer.fairseq.meters import Meter
        >>> Meter().state_dict()
        {}
    """

    _saved: ClassVar[tuple[str, ...]] = ()  # the attributes that are the state

    def state_dict(self) -> State:
        """Return what load_state_dict() takes, of plain values and tensors."""
        return {name: getattr(self, name) for name in self._saved}

    def load_state_dict(self, state_dict: State) -> None:
        """Take over what state_dict() returned.

        Args:
            state_dict (State): The state.
        """
        vars(self).update({name: state_dict[name] for name in self._saved})

    def reset(self) -> None:
        """Forget all values."""
        raise NotImplementedError(f"{type(self).__name__} must define reset()")

    @property
    def smoothed_value(self) -> Scalar:
        """The value that is reported, rounded."""
        raise NotImplementedError(f"{type(self).__name__} must define smoothed_value")


def safe_round(number: Any, ndigits: int) -> Any:
    """Return a number rounded; what has no single value is returned as it is.

    Args:
        number: A number, or a tensor or array of one element.
        ndigits (int): Decimals.
    """
    if hasattr(number, "__round__"):
        return round(number, ndigits)
    if is_tensor(number):
        return safe_round(number.item(), ndigits) if number.numel() == 1 else number
    if getattr(number, "ndim", None) == 0 and hasattr(number, "item"):
        return safe_round(number.item(), ndigits)
    return number


class _RoundedMeter(Meter):
    """A meter whose smoothed value is rounded to `round` decimals, unless None."""

    def __init__(self, round: int | None = None) -> None:
        self.round = round
        self.reset()

    def _value(self) -> Scalar:
        raise NotImplementedError

    def state_dict(self) -> State:
        return {**super().state_dict(), "round": self.round}

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self.round = state_dict.get("round")

    @property
    def smoothed_value(self) -> Scalar:
        value = self._value()
        if self.round is None or value is None:
            return value
        return safe_round(value, self.round)


class AverageMeter(_RoundedMeter):
    """The weighted mean of its values.

    `val` is the latest value, `sum` that of value times weight, `count` that of the
    weights. An update of weight 0 changes `val` alone, which is reported as long as
    nothing has had weight.

    Args:
        round (int | None, default None): Decimals that are reported; None: all.

    Example:
        >>> from ctrainer.fairseq.meters import AverageMeter
        >>> meter = AverageMeter(round=2)
        >>> meter.update(1.0, n=2)
        >>> meter.update(4.0)
        >>> meter.avg
        2.0
    """

    _saved = ("val", "sum", "count")

    def reset(self) -> None:
        self.val: Scalar = None
        self.sum: Scalar = 0
        self.count: Scalar = 0

    def update(self, val: Scalar, n: Scalar = 1) -> None:
        """Add a value.

        Args:
            val (Scalar): The value; None is left out.
            n (Scalar, default 1): Its weight.
        """
        if val is None:
            return
        if n > 0:
            total = type_as(self.sum, val) + val * n
            self.count = type_as(self.count, n) + n
            self.sum = total
        self.val = val

    @property
    def avg(self) -> Scalar:
        """The weighted mean."""
        return self.sum / self.count if self.count > 0 else self.val

    def _value(self) -> Scalar:
        return self.avg


class SumMeter(_RoundedMeter):
    """The sum of its values.

    Args:
        round (int | None, default None): Decimals that are reported; None: all.

    Example:
        >>> from ctrainer.fairseq.meters import SumMeter
        >>> meter = SumMeter()
        >>> meter.update(3)
        >>> meter.sum
        3
    """

    _saved = ("sum",)

    def reset(self) -> None:
        self.sum: Scalar = 0

    def update(self, val: Scalar) -> None:
        """Add a value.

        Args:
            val (Scalar): The value; None is left out.
        """
        if val is not None:
            self.sum = type_as(self.sum, val) + val

    def _value(self) -> Scalar:
        return self.sum


class ConcatTensorMeter(Meter):
    """Its tensors, joined; reports [].

    Args:
        dim (int, default 0): Along which they are joined.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.meters import ConcatTensorMeter
        >>> meter = ConcatTensorMeter()
        >>> meter.update(torch.ones(2))
        >>> meter.tensor
        tensor([1., 1.])
    """

    _saved = ("tensor",)

    def __init__(self, dim: int = 0) -> None:
        self.dim = dim
        self.reset()

    def reset(self) -> None:
        self.tensor: Any = None

    def update(self, val: Any) -> None:
        """Append a tensor.

        Args:
            val (torch.Tensor): The tensor.
        """
        if self.tensor is None:
            self.tensor = val
        else:
            torch = sys.modules["torch"]
            self.tensor = torch.cat([self.tensor, val], dim=self.dim)

    @property
    def smoothed_value(self) -> Scalar:
        return []


class TimeMeter(_RoundedMeter):
    """Events per second since `reset`.

    Args:
        init (float, default 0): Seconds before it that count.
        n (Scalar, default 0): Events before it that count.
        round (int | None, default None): Decimals that are reported; None: all.

    Example:
        >>> from ctrainer.fairseq.meters import TimeMeter
        >>> meter = TimeMeter(init=10, n=20)
        >>> meter.n
        20
    """

    def __init__(
        self, init: float = 0, n: Scalar = 0, round: int | None = None
    ) -> None:
        self.round = round
        self.reset(init, n)

    def reset(self, init: float = 0, n: Scalar = 0) -> None:
        """Start the clock.

        Args:
            init (float, default 0): Seconds before it that count.
            n (Scalar, default 0): Events before it that count.
        """
        self.init = init
        self.start = time.perf_counter()
        self.n = n
        self.i = 0  # updates since the reset

    def update(self, val: Scalar = 1) -> None:
        """Count events.

        Args:
            val (Scalar, default 1): Their number.
        """
        self.n = type_as(self.n, val) + val
        self.i += 1

    def state_dict(self) -> State:
        return {"init": self.elapsed_time, "n": self.n, "round": self.round}

    def load_state_dict(self, state_dict: State) -> None:
        if "start" in state_dict:  # the layout before fairseq 0.9: no count of events
            self.reset(init=state_dict["init"])
        else:
            self.reset(init=state_dict["init"], n=state_dict["n"])
            self.round = state_dict.get("round")

    @property
    def avg(self) -> Scalar:
        """Events per second."""
        return self.n / self.elapsed_time

    @property
    def elapsed_time(self) -> float:
        """Seconds, those before the reset included."""
        return self.init + (time.perf_counter() - self.start)

    def _value(self) -> Scalar:
        return self.avg


class StopwatchMeter(_RoundedMeter):
    """Seconds between `start` and `stop`: their sum, or with weights their mean; before
    the first stop the seconds since `start`.

    Args:
        round (int | None, default None): Decimals that are reported; None: all.

    Example:
        >>> from ctrainer.fairseq.meters import StopwatchMeter
        >>> meter = StopwatchMeter()
        >>> meter.start()
        >>> meter.stop()
        >>> meter.sum > 0
        True
    """

    _saved = ("sum", "n")

    def __init__(self, round: int | None = None) -> None:
        self.round = round
        self.sum: float = 0
        self.n: Scalar = 0
        self.start_time: float | None = None

    def start(self) -> None:
        """Start the clock."""
        self.start_time = time.perf_counter()

    def stop(self, n: Scalar = 1, prehook: Callable[[], object] | None = None) -> None:
        """Add the time since `start`; without a start, nothing.

        Args:
            n (Scalar, default 1): Its weight.
            prehook (Callable[[], object] | None, default None): Called first, for
                instance to wait for the device.
        """
        if self.start_time is None:
            return
        if prehook is not None:
            prehook()
        self.sum += time.perf_counter() - self.start_time
        self.n = type_as(self.n, n) + n

    def reset(self) -> None:
        """Forget all durations and start anew."""
        self.sum = 0
        self.n = 0
        self.start()

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self.start_time = None

    @property
    def avg(self) -> Scalar:
        """The mean of the times by their weights, or without weights their sum."""
        return self.sum / self.n if self.n > 0 else self.sum

    @property
    def elapsed_time(self) -> float:
        """Seconds since `start`; 0 before."""
        if self.start_time is None:
            return 0.0
        return time.perf_counter() - self.start_time

    def _value(self) -> Scalar:
        return self.avg if self.sum > 0 else self.elapsed_time


class DerivedMeter(Meter):
    """A value computed from the other meters of its dictionary when it is read."""

    def __init__(self, fn: Callable[[MetersDict], Scalar]) -> None:
        self.fn = fn

    def reset(self) -> None:
        """Nothing is kept."""

    def derived_from(self, meters: MetersDict) -> Scalar:
        return self.fn(meters)


class MetersDict(dict[str, Meter]):
    """Meters by name, in the order of (priority, insertion); low priorities first.

    `meters[key] = (priority, meter)` adds one; a key is given once.

    Example:
        >>> from ctrainer.fairseq.meters import AverageMeter, MetersDict
        >>> meters = MetersDict()
        >>> meters["loss"] = 10, AverageMeter()
        >>> meters["loss"].update(0.5)
        >>> meters.get_smoothed_values()
        OrderedDict([('loss', 0.5)])
    """

    _DerivedMeter = DerivedMeter

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[str, tuple[int, int]] = {}  # (priority, place) by key
        self._added = 0
        self._highest = -math.inf  # priority

    @property
    def priorities(self) -> list[tuple[int, int, str]]:
        """(priority, place of insertion, key) of each meter, in their order."""
        return [(*self._ranks[key], key) for key in self]

    def add_meter(self, key: str, meter: Meter, priority: int) -> None:
        """Add a meter.

        Args:
            key (str): Its name.
            meter (Meter): The meter.
            priority (int): Low ones come first.

        Raises:
            ValueError: the key has one.
        """
        if key in self:
            raise ValueError(
                f"MetersDict doesn't support reassignment: there is a meter {key!r}"
            )
        self._ranks[key] = priority, self._added
        self._added += 1
        later = []
        if priority < self._highest:
            later = [k for k in self if self._ranks[k][0] > priority]
        self._highest = max(self._highest, priority)
        super().__setitem__(key, meter)
        for k in later:
            super().__setitem__(k, self.pop(k))

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError(
                f"meters[{key!r}] was given a {type(value).__name__}; expected "
                "(priority, meter)"
            )
        self.add_meter(key, value[1], value[0])

    def get_smoothed_value(self, key: str) -> Scalar:
        """Return one meter's value as it is reported.

        Args:
            key (str): Its name.

        Raises:
            KeyError: there is none.
        """
        meter = self[key]
        derive = getattr(meter, "derived_from", None)
        return meter.smoothed_value if derive is None else derive(self)

    def get_smoothed_values(self) -> OrderedDict[str, Scalar]:
        """Return all values as they are reported, but those of names that begin with an
        underscore."""
        shown = [key for key in self if not key.startswith("_")]
        return OrderedDict((key, self.get_smoothed_value(key)) for key in shown)

    def __reduce__(self) -> tuple[Any, ...]:
        entries = [(key, (pri, self[key])) for pri, _, key in self.priorities]
        return type(self), (), None, None, iter(entries)

    def state_dict(self) -> list[tuple[int, str, str, State]]:
        """Return (priority, key, class name, state) of each meter but derived ones."""
        return [
            (priority, key, type(self[key]).__name__, self[key].state_dict())
            for priority, _, key in self.priorities
            if not isinstance(self[key], DerivedMeter)
        ]

    def load_state_dict(self, state_dict: list[tuple[int, str, str, State]]) -> None:
        """Replace all meters by those of a state.

        Args:
            state_dict (list[tuple[int, str, str, State]]): What state_dict() returned.

        Raises:
            ValueError: a class that is no Meter of a loaded module; nothing has
                changed.
        """
        revived = MetersDict()
        for priority, key, class_name, state in state_dict:
            meter = _meter_class(key, class_name)()
            meter.load_state_dict(state)
            revived.add_meter(key, meter, priority)
        self.take_over(revived)

    def take_over(self, other: MetersDict) -> None:
        """Replace all meters by those of another dictionary, the objects themselves.

        Args:
            other (MetersDict): The other one.
        """
        self.clear()
        for priority, _, key in other.priorities:
            self.add_meter(key, other[key], priority)

    def reset(self) -> None:
        """Reset each meter."""
        for meter in self.values():
            meter.reset()


def _meter_class(key: str, name: str) -> type[Meter]:
    own = globals().get(name) if name in __all__ else None
    if own is not None:
        return own  # type: ignore[no-any-return]
    for cls in _subclasses(Meter):
        if cls.__name__ == name:
            return cls
    raise ValueError(
        f"the meter {key!r} was saved as a {name}, and no loaded module has a Meter of "
        "that name; import the module that defines it before loading"
    )


def _subclasses(cls: type[Meter]) -> Iterator[type[Meter]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
