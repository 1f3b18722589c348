"""Stages, offload, precision, optimizers, schedules and resuming drawn together."""

from __future__ import annotations

from typing import Any

import drawn_deepspeed_engines as runs
import pytest
import ranks
from drawn_trainings import apart
from draws import draws

NUMBERS = range(draws(10, 400))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("drawn")
    return ranks.told(ranks.run(folder, "compat.drawn_engines", numbers=list(NUMBERS)))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", NUMBERS)
def test_options_together_train_as_torch_does(found: list[Any], number: int) -> None:
    case = runs.drawn(number)
    results = [rank[str(number)] for rank in found]
    assert not [r["failed"] for r in results if "failed" in r]
    wanted = runs.expected(case)
    rel = 5e-2 if case.is_rough else 1e-4
    for rank, result in enumerate(results):
        assert result["steps"] == runs.UPDATES
        assert result["rates"] == pytest.approx(wanted["rates"], rel=1e-9), case
        own = wanted["loss"][rank :: runs.RANKS]
        assert result["loss"] == pytest.approx(own, rel, 1e-2 * case.is_rough), case
        furthest = apart(result["weights"], wanted["weights"]).max()
        assert furthest < (4 * runs.LR if case.is_rough else 2e-4), case
