"""The global generators of Python and NumPy: their states, and draws by place."""

from __future__ import annotations

import _random
import ctypes
import hashlib
import pickle
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
        """Return the states of the global generators; the caller changes nothing in
        them."""
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
    """Set the global generators to what rng_state() returned.

    Args:
        state (Mapping[str, Any]): "python" and "numpy".
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])


# ---- draws by place ----------------------------------------------------------------

ALL = -1  # batches of an epoch
_NEXT = 8  # batches that are asked after one that has drawn


def place_word(*numbers: int) -> int:
    """Return 63 bits that follow from the numbers.

    Args:
        *numbers (int): A seed, an epoch, a place in it.
    """
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(word: int) -> None:
    """Seed random and NumPy's global generator.

    Args:
        word (int): Of 63 bits, of which NumPy takes the lower 32.
    """
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)


class _Words:
    """The 624 words and the position of an MT19937, copied from their address and back:
    to make Python's numbers of them takes longer than to read a small batch."""

    BYTES = 4 * 625

    def __init__(self, address: int) -> None:
        self._copy = (ctypes.c_char * self.BYTES)()
        self._address = address

    def take(self) -> None:
        ctypes.memmove(self._copy, self._address, self.BYTES)

    def put(self) -> None:
        ctypes.memmove(self._address, self._copy, self.BYTES)

    def now(self) -> bytes:
        return ctypes.string_at(self._address, self.BYTES)


def _words_at(address: int, expected: bytes) -> _Words | None:
    """None where the generator's own account of them is not what lies there."""
    found = ctypes.string_at(address, _Words.BYTES)
    return _Words(address) if found == expected else None


class _PythonState:
    """Python's global state, put aside and back: the words, which are all that C's
    object has, and a second normal number in store, which is an attribute."""

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._words = self._find()
        self._rest: Any = None

    def _find(self) -> _Words | None:
        begin, end = object.__basicsize__, _random.Random.__basicsize__
        if end - begin < _Words.BYTES:
            return None
        *words, position = self._generator.getstate()[1]
        expected = struct.pack("=i624I", position, *words)
        return _words_at(id(self._generator) + begin, expected)

    def take(self) -> None:
        if self._words is None:
            self._rest = self._generator.getstate()
            return
        self._words.take()
        self._rest = self._generator.gauss_next

    def put(self) -> None:
        if self._words is None:
            self._generator.setstate(self._rest)
            return
        self._words.put()
        self._generator.gauss_next = self._rest

    def now(self) -> Any:
        """What every draw after a seed changes."""
        return self._generator.getstate() if self._words is None else self._words.now()


class _NumpyState:
    """NumPy's global state, put aside and back.

    Words are copied at the address that NumPy gives for them. The rest, a second normal
    number in store, is left alone unless it has changed.
    """

    def __init__(self) -> None:
        self.bits = _numpy.get_bit_generator()
        self._rest = _C.ObjectWatch([_numpy.get_state.__self__])
        self._words = self._find()
        self._whole: Any = None
        self._store = (0, 0.0)
        self._known = False

    def _find(self) -> _Words | None:
        if type(self.bits) is not np.random.MT19937:
            return None
        state = self.bits.state["state"]
        words = state["key"].astype(np.uint32).tobytes()
        expected = words + struct.pack("=i", state["pos"])
        return _words_at(int(self.bits.ctypes.state_address), expected)

    def take(self) -> None:
        if self._words is None:
            self._whole = _numpy.get_state(legacy=False)
            return
        if self._rest.changed() or not self._known:
            state = _numpy.get_state(legacy=False)
            self._store = state["has_gauss"], state["gauss"]
            self._known = True
        self._words.take()

    def put(self) -> None:
        if self._words is None:
            np.random.set_state(self._whole)
            return
        self._words.put()
        if self._rest.changed():
            state = _numpy.get_state(legacy=False)
            state["has_gauss"], state["gauss"] = self._store
            np.random.set_state(state)
            self._rest.changed()

    def now(self) -> Any:
        """What every draw after a seed changes."""
        if self._words is None:
            return pickle.dumps(self.bits.state)
        return self._words.now()


class PlaceDraws:
    """Lets a batch draw its random numbers by its place, in the training process.

    The global generators are seeded for it, and continue afterwards as if it had drawn
    none. That takes longer than to read a small batch, so the first batch shows whether
    its epoch draws. Where it draws nothing, batches 1, 2, 4, 8 and so on are asked
    again, and the next ones after any that has drawn; the others draw as it comes.
    Places alone decide, and what was drawn there, so a resumed run asks the same ones.

    Example:
        >>> import random
        >>> from ctrainer.adapters.generators import PlaceDraws, place_word
        >>> draws = PlaceDraws()
        >>> draws.due(0)
        True
        >>> draws.begin(place_word(42, 0, 0))
    """

    def __init__(self) -> None:
        self._python = _PythonState()
        self._numpy = _NumpyState()
        self._seeded: Any = None  # the states when a batch began that is asked
        self.left: int | None = None  # batches to be seeded, ALL or not known yet
        self.open = False

    def due(self, place: int) -> bool:
        """Return whether the batch is to begin with its seed.

        Args:
            place (int): Of the batch in its epoch, from 0.
        """
        return self.left != 0 or not place & (place - 1)

    def begin(self, word: int) -> None:
        """Put the states aside, unless that is done, and seed.

        Args:
            word (int): The seed, as place_word returns it.
        """
        if not self.open:
            self.take()
            self.open = True
        self.seed(word)
        self._seeded = None if self.left == ALL else self.now()

    def end(self) -> None:
        """Put the states back, if they were put aside."""
        if not self.open:
            return
        self.open = False
        try:
            if self._seeded is not None:
                self._count(self._seeded != self.now())
        finally:
            self.put()

    def _count(self, has_drawn: bool) -> None:
        if has_drawn:
            self.left = ALL if self.left is None else _NEXT
        else:
            self.left = max((self.left or 0) - 1, 0)

    def now(self) -> tuple[Any, ...]:
        """Return the states, to see whether anything was drawn since seeding."""
        return self._python.now(), self._numpy.now()

    def seed(self, word: int) -> None:
        """Seed the generators.

        Args:
            word (int): The seed.
        """
        seed_generators(word)

    def take(self) -> None:
        """Put the states of the generators aside."""
        if _numpy.get_bit_generator() is not self._numpy.bits:
            self._numpy = _NumpyState()
        self._python.take()
        self._numpy.take()

    def put(self) -> None:
        """Set the generators to the states that were put aside."""
        self._python.put()
        self._numpy.put()
