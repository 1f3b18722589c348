"""Sharded training of 500 models that are dealt from a table, as in one process."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import fsdp_models as models
import pytest
import torch
from draws import draws
from rank_threads import on_ranks

from ctrainer import _C

TABLE = models.table()


def bounds(spec: models.Spec, moved: float, most: float, largest: float) -> float:
    """How far a parameter may be from the expected, when this one has moved so far, and
    the others at most so far, in all steps.

    In float32 1e-5 of the largest value. A low dtype's gradients are the same before
    they are reduced in it, with a rounding for each rank and one for their sum; the
    second step's weights differ by as little, and come out of the cast a unit in the
    last place apart, which is told by a few times as much again in what is above and
    below it. Codes of parameters are half of 1/127 of the largest value off, in each
    of the ten layers that a gradient passes; those of gradients as much, once a step.
    """
    kind = spec["dtype"]
    if kind == "float32":
        return 1e-5 * largest
    if kind == "gather":
        return 0.4 * moved + 0.1 * most
    if kind == "reduce":
        return 0.1 * moved + most / 64
    eps = torch.finfo(models.compute_dtype(spec)).eps
    return 16 * eps * moved + 8 * eps * most


def compare(
    found: models.Values,
    expected: models.Values,
    before: models.Values,
    spec: models.Spec,
) -> None:
    assert found.keys() == expected.keys()
    largest = max(v.abs().max().item() for v in expected.values())
    moves = {n: (v - before[n]).abs().max().item() for n, v in expected.items()}
    for name, value in expected.items():
        off = (found[name] - value).abs().max().item()
        bound = bounds(spec, moves[name], max(moves.values()), largest)
        assert off <= bound, f"{name} is off by {off}, at most {bound}; model {spec}"


@pytest.mark.parametrize("number", range(draws(25, models.COUNT)))
def test_any_model_trains_like_plain_torch(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TABLE[number]
    if spec["released"] == "told":
        monkeypatch.delenv("CTRAINER_FSDP_POISON")
    plain = models.build(spec)
    copies = [copy.deepcopy(plain) for _ in range(spec["world"])]
    before = {name: v.clone() for name, v in plain.state_dict().items()}
    with warnings.catch_warnings():
        # A reentrant checkpoint of what needs no gradient says so, in both runs.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        expected = models.in_one_process(plain, spec)

        def train(group: _C.Communicator) -> None:
            model = models.sharded(copies[group.rank], spec, group)
            compare(models.on_a_rank(model, spec, group), expected, before, spec)

        on_ranks(spec["world"], train)


def test_the_table_has_at_least_twenty_models_of_every_value() -> None:
    assert len(TABLE) == 500
    for axis, values in models.AXES.items():
        counted = Counter(spec[axis] for spec in TABLE)
        assert set(counted) == set(values)
        assert min(counted.values()) >= 20
    above = sum(spec["above"] == "both" for spec in TABLE)
    assert above * 3 >= len(TABLE)  # frozen and detached ones above what is trained
