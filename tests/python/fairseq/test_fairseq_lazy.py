"""Numbers and dicts that are read late are what they would be at once."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrainer.fairseq._lazy import LazyNorm, LazyNumber, LazyValues
from ctrainer.fairseq.meters import AverageMeter


class Trainer:
    """Its updates become known when they are awaited."""

    def __init__(self) -> None:
        self.norms: list[tuple[LazyNorm, float]] = []
        self.waits = 0

    def update(self, norm: float) -> LazyNorm:
        for made, value in self.norms:
            made.settle(value)
        made = LazyNorm(self)
        self.norms = [(made, norm)]
        return made

    def _await_update(self) -> None:
        self.waits += 1
        for made, value in self.norms:
            made.settle(value)


class OriginalMeter:
    """The arithmetic of fairseq's AverageMeter on numbers."""

    def __init__(self) -> None:
        self.val: Any = None
        self.sum: Any = 0
        self.count: Any = 0

    def update(self, val: Any, n: Any = 1) -> None:
        self.val = val
        if n > 0:
            self.sum = self.sum + (val * n)
            self.count = self.count + n

    @property
    def avg(self) -> Any:
        return self.sum / self.count if self.count > 0 else self.val


NORMS = st.lists(
    st.tuples(st.floats(0, 1e6, width=32), st.sampled_from([0, 1, 2.5]), st.booleans()),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("kind", [AverageMeter, OriginalMeter])
@given(norms=NORMS)
def test_meters_have_the_values_of_floats(kind: Any, norms: Any) -> None:
    trainer, lazy, plain = Trainer(), kind(), kind()
    for norm, weight, looks in norms:
        lazy.update(trainer.update(norm), weight)
        plain.update(norm, weight)
        if looks:
            assert round(lazy.avg, 3) == round(plain.avg, 3)
    waits = trainer.waits
    assert waits <= sum(looks for _, _, looks in norms)
    assert float(lazy.avg) == float(plain.avg)
    assert float(lazy.sum) == float(plain.sum)


def test_a_sum_of_all_updates_is_no_deeper_than_one() -> None:
    trainer, meter = Trainer(), AverageMeter()
    for _ in range(5000):
        meter.update(trainer.update(0.5))
    assert trainer.waits == 0
    assert meter.avg == 0.5
    assert trainer.waits == 1


@given(a=st.floats(-1e6, 1e6), b=st.floats(1, 1e6))
def test_operators_are_those_of_floats(a: float, b: float) -> None:
    for name in ("add", "sub", "mul", "truediv", "eq", "ne", "lt", "le", "gt", "ge"):
        compute = getattr(operator, name)
        for one, other in (
            (LazyNumber(lambda: a), b), (LazyNumber(lambda: a), LazyNumber(lambda: b)),
        ):  # fmt: skip
            found = compute(one, other)
            assert (found if isinstance(found, bool) else float(found)) == compute(a, b)
    assert float(b + LazyNumber(lambda: a)) == b + a
    assert float(b * LazyNumber(lambda: a)) == b * a
    number = LazyNumber(lambda: a)
    assert f"{number:.3f}" == f"{a:.3f}"
    assert repr(number) == repr(a)
    assert hash(number) == hash(a)
    assert bool(number) == bool(a)
    assert float(np.float64(number)) == a
    for copied in (pickle.loads(pickle.dumps(number)), copy.deepcopy(number)):
        assert type(copied) is float
        assert copied == a


def test_a_number_that_is_no_operand_is_rejected() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        LazyNumber(lambda: 1.0) + "a"


def test_the_norm_of_a_trainer_that_is_gone_is_nan() -> None:
    assert math.isnan(float(LazyNorm(Trainer())))


USES: list[Any] = [
    lambda d: d["a"], lambda d: d.get("b"), lambda d: "a" in d, len, list, bool, repr,
    lambda d: d == {"a": 1, "b": 2}, lambda d: d != {"a": 1}, lambda d: {**d},
    dict, json.dumps, lambda d: d | {"c": 3}, lambda d: {"c": 3} | d,
    lambda d: list(reversed(d)), lambda d: d.pop("a"), lambda d: list(d.items()),
    lambda d: list(d.values()), lambda d: d.copy(), copy.copy, copy.deepcopy,
    lambda d: pickle.loads(pickle.dumps(d)), lambda d: d.setdefault("c", 4),
    lambda d: d.popitem(), lambda d: OrderedDict(d), lambda d: {"a": 1, "b": 2} == d,
    lambda d: dict(**d), lambda d: d == d.copy(), lambda d: sorted(d),
]  # fmt: skip
CHANGES: list[Any] = [
    lambda d: d.update(c=3), lambda d: d.__setitem__("b", 5), lambda d: d.clear(),
    lambda d: d.__delitem__("a"), lambda d: d.__ior__({"c": 3}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(USES)))
def test_a_use_of_a_lazy_dict_is_that_of_a_dict(number: int) -> None:
    fills: list[int] = []

    def fill() -> dict[str, int]:
        fills.append(1)
        return {"a": 1, "b": 2}

    lazy = LazyValues(fill, {"b": 2})
    assert isinstance(lazy, dict)
    assert not fills
    assert USES[number](lazy) == USES[number]({"a": 1, "b": 2})
    assert len(fills) == 1
    for change in CHANGES:
        changed, expected = LazyValues(fill, {"b": 2}), {"a": 1, "b": 2}
        change(changed)
        change(expected)
        assert changed == expected
    assert LazyValues(fill, {"b": 2}) == LazyValues(fill, {"b": 2})
