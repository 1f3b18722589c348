"""Sharded training of 500 models that are dealt from a table, as in one process."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import Counter

import fsdp_models as models
import pytest
from draws import draws
from rank_threads import on_ranks

from ctrainer import _C

TABLE = models.table()


def train_and_drop(spec: models.Spec) -> list[weakref.ref[_C.FSDPUnit]]:
    """The outermost unit of each rank, once the models are trained and compared."""
    plain = models.build(spec)
    copies = [copy.deepcopy(plain) for _ in range(spec["world"])]
    before = {name: v.clone() for name, v in plain.state_dict().items()}
    expected = models.in_one_process(plain, spec)

    def train(group: _C.Communicator) -> weakref.ref[_C.FSDPUnit]:
        model = models.sharded(copies[group.rank], spec, group)
        models.compare(models.on_a_rank(model, spec, group), expected, before, spec)
        return weakref.ref(model._unit)

    return on_ranks(spec["world"], train)


@pytest.mark.parametrize("number", range(draws(25, models.COUNT)))
def test_any_model_trains_like_plain_torch_and_leaves_no_memory(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TABLE[number]
    if spec["released"] == "told":
        monkeypatch.delenv("CTRAINER_FSDP_POISON")
    with warnings.catch_warnings():
        # A reentrant checkpoint of what needs no gradient says so, in both runs.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        units = train_and_drop(spec)
    gc.collect()
    assert [unit() for unit in units] == [None] * spec["world"]


def test_the_table_has_at_least_twenty_models_of_every_value() -> None:
    assert len(TABLE) == 500
    for axis, values in models.AXES.items():
        counted = Counter(spec[axis] for spec in TABLE)
        assert set(counted) == set(values)
        assert min(counted.values()) >= 20
    above = sum(spec["above"] == "both" for spec in TABLE)
    assert above * 3 >= len(TABLE)  # frozen and detached ones above what is trained
