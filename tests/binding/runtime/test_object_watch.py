"""ObjectWatch, and the states of generators that are copied only when they moved."""

import random

import numpy as np
import pytest

from ctrainer import _C
from ctrainer.adapters.generators import rng_state, set_rng_state


def test_an_object_has_changed_once_for_each_time_that_it_did():
    generator = random.Random(1)
    watch = _C.ObjectWatch([generator])
    assert watch.changed()
    assert not watch.changed()
    generator.random()
    assert watch.changed()
    assert not watch.changed()


def test_any_of_the_objects_counts_and_none_never_changes():
    first, second = random.Random(1), random.Random(2)
    watch = _C.ObjectWatch(iter([first, second]))
    watch.changed()
    second.random()
    assert watch.changed()
    assert not _C.ObjectWatch([]).changed()


def test_it_may_be_initialised_twice_and_only_with_objects():
    watch = _C.ObjectWatch([random.Random(1)])
    watch.__init__([])
    assert not watch.changed()
    with pytest.raises(TypeError):
        watch.__init__(5)
    assert not watch.changed()


def _assert_same(old, new):
    assert old["python"] == new["python"]
    for a, b in zip(old["numpy"], new["numpy"], strict=True):
        np.testing.assert_array_equal(a, b)


def _truth():
    return {"python": random.getstate(), "numpy": np.random.get_state()}


MOVES = [
    random.random,
    lambda: random.gauss(0, 1),  # one draw leaves a second number for the next
    lambda: random.gauss(0, 1),
    np.random.random,
    np.random.standard_normal,  # likewise
    np.random.standard_normal,
    lambda: np.random.seed(3),
    lambda: random.seed(3),
]


def test_the_states_are_those_of_the_generators_after_every_kind_of_draw():
    before = rng_state()
    for move in MOVES:
        move()
        _assert_same(rng_state(), _truth())
    set_rng_state(before)
    _assert_same(rng_state(), before)
    _assert_same(before, _truth())


def test_the_copy_is_kept_as_long_as_nothing_is_drawn():
    assert rng_state() is rng_state()
    first = rng_state()
    np.random.random()
    assert rng_state() is not first


def test_another_bit_generator_of_numpy_is_noticed():
    own = np.random.get_bit_generator()
    try:
        for bits in (np.random.MT19937(5), np.random.PCG64(5)):
            np.random.set_bit_generator(bits)
            rng_state()
            np.random.random()
            seen = np.random.get_state(legacy=False)["state"]
            state = rng_state()["numpy"]
            if isinstance(state, dict):
                assert state["state"] == seen
            else:
                np.testing.assert_array_equal(state[1], seen["key"])
                assert state[2] == seen["pos"]
    finally:
        np.random.set_bit_generator(own)
    _assert_same(rng_state(), _truth())
