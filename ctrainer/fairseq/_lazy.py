"""Numbers of an update that a GPU is still busy with: read where somebody asks."""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ctrainer.adapters import torch_fairseq as tools

__all__ = ["LazyNorm", "LazyNumber", "LazyValues", "plain"]


def plain(value: Any) -> Any:
    """Return a LazyNumber as the float that it is, and anything else as it is.

    Args:
        value: The number.
    """
    return float(value) if isinstance(value, LazyNumber) else value


def is_known(value: Any) -> bool:
    """Return whether a number has its value, which only a LazyNumber may lack.

    Args:
        value: The number.
    """
    return not isinstance(value, LazyNumber) or value.is_known


def _lazily(compute: Callable[..., float]) -> Callable[..., Any]:
    """A method whose result is lazy as long as an operand is not known."""

    def method(self: LazyNumber, other: Any) -> Any:
        if not isinstance(other, int | float | LazyNumber):
            return NotImplemented
        result = LazyNumber(compute, self, other)
        return float(result) if result.is_known else result

    return method


def _at_once(compute: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads the value."""
    return lambda self, *others: compute(float(self), *map(plain, others))


class LazyNumber:
    """A float that is computed when it is read. Sums, products and quotients with it
    are lazy, too, and floats where its value is known; so meters add it up as they do
    any number, those of fairseq too.

    Args:
        compute (Callable[..., float]): (*operands as floats) -> the value.
        *operands: Numbers, LazyNumber among them.

    Example:
        >>> from ctrainer.fairseq._lazy import LazyNumber
        >>> round(LazyNumber(lambda: 1.5) * 2 + 1, 1)
        4.0
    """

    def __init__(self, compute: Callable[..., float], *operands: Any) -> None:
        # Of known ones the values: a sum of all updates keeps none of its terms.
        known = [plain(n) if is_known(n) else n for n in operands]
        self._compute, self._operands = compute, known
        self._value: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether a read waits for nothing."""
        known = bool(self._operands) and all(map(is_known, self._operands))
        return self._value is not None or known

    def __float__(self) -> float:
        if self._value is None:
            self._value = float(self._compute(*map(plain, self._operands)))
            self._operands = []
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)

    __add__ = __radd__ = _lazily(operator.add)
    __mul__ = __rmul__ = _lazily(operator.mul)
    __sub__ = _lazily(operator.sub)
    __truediv__ = _lazily(operator.truediv)
    __round__ = _at_once(round)
    __format__ = _at_once(format)
    __repr__ = _at_once(repr)
    __hash__ = _at_once(hash)
    __bool__ = _at_once(bool)
    __eq__ = _at_once(operator.eq)
    __lt__ = _at_once(operator.lt)
    __le__ = _at_once(operator.le)
    __gt__ = _at_once(operator.gt)
    __ge__ = _at_once(operator.ge)


class LazyNorm(LazyNumber):
    """The norm of the gradients of a trainer's last update, rounded to float32. A read
    waits for the update, and raises FloatingPointError where the norm is not finite.

    Args:
        trainer (_C.FairseqTrainer): The trainer; NaN once it is gone.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(self._await)
        self._trainer = weakref.ref(trainer)

    def settle(self, norm: float) -> None:
        """Take the value.

        Args:
            norm (float): The value.
        """
        self._value = float(tools.scalar(norm))

    def _await(self) -> float:
        trainer = self._trainer()
        if trainer is not None:
            trainer._await_update()
        return math.nan if self._value is None else self._value


class LazyValues(dict[str, Any]):
    """A dict that is filled when it is used.

    Args:
        fill (Callable[[], Mapping[str, Any]]): Returns what is in it.
        known (Mapping[str, Any]): A part of that, not empty: json takes a dict for
            empty that has nothing.

    Example:
        >>> from ctrainer.fairseq._lazy import LazyValues
        >>> LazyValues(lambda: {"loss": 0.5, "size": 2}, {"size": 2})["loss"]
        0.5
    """

    def __init__(
        self, fill: Callable[[], Mapping[str, Any]], known: Mapping[str, Any]
    ) -> None:
        super().__init__(known)
        self._fill: Callable[[], Mapping[str, Any]] | None = fill

    def fill(self) -> None:
        """Fill it, once."""
        if self._fill is not None:
            values = self._fill()
            self._fill = None
            dict.clear(self)
            dict.update(self, values)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _filled(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for values in args:
            if isinstance(values, LazyValues):
                values.fill()
        return method(*args, **kwargs)

    return call


for _name in (
    "__contains__ __delitem__ __eq__ __getitem__ __ior__ __iter__ __len__ __ne__ "
    "__or__ __repr__ __reversed__ __ror__ __setitem__ clear copy get items keys pop "
    "popitem setdefault update values"
).split():
    setattr(LazyValues, _name, _filled(getattr(dict, _name)))
