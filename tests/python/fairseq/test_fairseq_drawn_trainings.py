"""Backends, precision, optimizers, schedules, averages and resuming drawn together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drawn_fairseq_trainings as runs
import pytest
import ranks
from drawn_trainings import apart
from draws import draws

NUMBERS = range(draws(10, 400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Any]:
    return ranks.told(ranks.run(folder, "fairseq.drawn", numbers=list(NUMBERS)))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", NUMBERS)
def test_options_together_train_as_fairseq_does_or_are_rejected(
    found: list[Any], folder: Path, number: int
) -> None:
    case = runs.drawn(number)
    results = [rank[str(number)] for rank in found]
    assert not [r["failed"] for r in results if "failed" in r]
    if "rejected" in results[0]:
        why = {r["rejected"] for r in results}
        assert len(why) == 1
        assert is_rejected(case), (case, why)
        return
    if case.resumes == "one" and case.resumes_alone:
        results.append(runs.alone(case, f"{folder}/{number}"))
    wanted = runs.expected(case)
    rel = 3e-2 if case.is_rough else 1e-4
    for result in results:
        losses = result["loss"]
        assert result["updates"] == runs.UPDATES - case.overflows
        assert losses == pytest.approx(wanted["loss"][-len(losses) :], rel, 1e-3), case
        for kind in ("weights", "averages"):
            assert (kind in result) == (kind in wanted), case
            if kind in wanted:
                furthest = apart(result[kind], wanted[kind]).max()
                most = 2 * case.rate if case.is_rough else 2e-4
                assert furthest < most, (case, kind)


def is_rejected(case: runs.Drawn) -> bool:
    """What the original rejects, too: shards are updated element by element, and share
    the state out already; not every optimizer has a flat parameter, or 16 bits."""
    sharded = case.backend == "fully_sharded"
    if sharded and (case.zero == "os" or case.optimizer in ("adafactor", "adagrad")):
        return True
    if case.precision in ("fp16", "bf16") and not sharded:
        return case.optimizer in ("adafactor", "adagrad") or case.zero == "os"
    return case.precision.endswith("in place") and not case.in_place and not sharded
