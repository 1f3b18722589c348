"""The states of Python's and NumPy's generators of random numbers, cheaply."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from ctrainer import _C

__all__ = ["rng_state", "set_rng_state"]


_numpy: Any = np.random  # its stubs lack some of what is used here


class _Generators:
    """Copies of the states, made anew when a generator has moved.

    To copy them takes 45 microseconds, to see that they have not moved one.
    """

    def __init__(self) -> None:
        self._bits: Any = None
        self._watch = _C.ObjectWatch([])
        self._state: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """The states of the global generators; the caller changes nothing in them."""
        python = random.getstate.__self__  # type: ignore[attr-defined]
        bits = _numpy.get_bit_generator()
        if bits is not self._bits:
            self._bits = bits
            self._watch = _C.ObjectWatch([python, _numpy.get_state.__self__, bits])
        if self._watch.changed() or not self._holds(python):
            numpy = _numpy.get_state(legacy=type(bits) is np.random.MT19937)
            self._state = {"python": random.getstate(), "numpy": numpy}
        return self._state

    def _holds(self, python: Any) -> bool:
        """Is all of the state within the objects, but for Python's second normal
        number, which is an attribute, and as it was?"""
        inside = type(self._bits) is np.random.MT19937
        return inside and python.gauss_next is self._state["python"][2]


rng_state = _Generators().state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the global generators to what rng_state() returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
