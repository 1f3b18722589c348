"""The global generators of Python and NumPy: their states, and draws by place."""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from ctrainer import _C

__all__ = ["PlaceDraws", "place_word", "rng_state", "seed_generators", "set_rng_state"]


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


# ---- draws by place ----------------------------------------------------------------


def place_word(*numbers: int) -> int:
    """63 bits that follow from the numbers: a seed, an epoch, a place in it."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(word: int) -> None:
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)


class _NumpyState:
    """NumPy's global state, put aside and back.

    get_state() and set_state() convert 624 numbers, which takes 90 microseconds: here
    the words of an MT19937 are copied, at the address that NumPy gives for it, and the
    rest, a second normal number in store, is left alone unless it has changed.
    """

    _BYTES = 4 * 625  # MT19937: 624 words and the position among them
    _Words = ctypes.c_char * _BYTES

    def __init__(self) -> None:
        self.bits = _numpy.get_bit_generator()
        self._words = self._Words()
        self._rest = _C.ObjectWatch([_numpy.get_state.__self__])
        self._address = self._find()
        self._whole: Any = None
        self._store = (0, 0.0)
        self._known = False

    def _find(self) -> int | None:
        """Where the words lie; None where NumPy keeps them in another way."""
        if type(self.bits) is not np.random.MT19937:
            return None
        address = int(self.bits.ctypes.state_address)
        state = self.bits.state["state"]
        found = ctypes.string_at(address, self._BYTES)
        expected = state["key"].astype(np.uint32).tobytes()
        alike = found == expected + struct.pack("=i", state["pos"])
        return address if alike else None

    def take(self) -> None:
        if self._address is None:
            self._whole = _numpy.get_state(legacy=False)
            return
        if self._rest.changed() or not self._known:
            state = _numpy.get_state(legacy=False)
            self._store = state["has_gauss"], state["gauss"]
            self._known = True
        ctypes.memmove(self._words, self._address, self._BYTES)

    def put(self) -> None:
        if self._address is None:
            np.random.set_state(self._whole)
            return
        ctypes.memmove(self._address, self._words, self._BYTES)
        if self._rest.changed():
            state = _numpy.get_state(legacy=False)
            state["has_gauss"], state["gauss"] = self._store
            np.random.set_state(state)
            self._rest.changed()


class PlaceDraws:
    """Lets a batch draw its random numbers by its place, in the training process: the
    global generators are seeded for it, and go on afterwards as if it had drawn none.
    """

    def __init__(self) -> None:
        self._python: Any = None
        self._numpy = _NumpyState()
        self.open = False

    def begin(self, word: int) -> None:
        """Put the states aside, unless that is done, and seed."""
        if not self.open:
            self.take()
            self.open = True
        self.seed(word)

    def end(self) -> None:
        """Put the states back, if they were put aside."""
        if self.open:
            self.open = False
            self.put()

    def now(self) -> tuple[Any, ...]:
        """The states as they are, to be compared."""
        told = _numpy.get_state(legacy=False)
        inner = dict(told["state"])
        words = inner.pop("key", np.empty(0)).tobytes()
        store = told.get("has_gauss"), told.get("gauss")
        return random.getstate(), repr(inner), words, store

    def seed(self, word: int) -> None:
        seed_generators(word)

    def take(self) -> None:
        if _numpy.get_bit_generator() is not self._numpy.bits:
            self._numpy = _NumpyState()
        self._python = random.getstate()
        self._numpy.take()

    def put(self) -> None:
        random.setstate(self._python)
        self._numpy.put()
