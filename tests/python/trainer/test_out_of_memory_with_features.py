"""auto_find_batch_size with what else changes batches, losses and updates: runs whose
passes fail at drawn steps and places are those in which none does."""

from pathlib import Path
from typing import Any

import pytest
from draws import draws
from ranks import run, told

pytest.importorskip("transformers")
pytest.importorskip("peft")

import failing_features as features

EXACT = ("rates", "epochs", "generators")


def is_the_run_without(found: dict[str, Any]) -> None:
    plain, failing = found["plain"], found["failing"]
    assert plain.keys() == failing.keys()
    for name, expected in plain.items():
        if name in EXACT:
            assert failing[name] == expected, (name, found["case"])
        else:
            assert failing[name] == pytest.approx(
                expected, rel=features.bound(found["case"], name), abs=1e-6
            ), (name, found["case"])


def test_runs_of_drawn_features(tmp_path: Path) -> None:
    failed = 0
    for seed in range(draws(4, 40)):
        case = features.drawn(seed, 1)
        found = features.both(str(tmp_path / str(seed)), case, 0)
        is_the_run_without(found)
        failed += found["failed"]
    assert failed >= draws(12, 100)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_drawn_features(tmp_path: Path, world: int) -> None:
    seeds = list(range(24))
    ranks = told(run(tmp_path, "trainer.failing_features", world, seeds=seeds))
    assert sum(found["failed"] for rank in ranks for found in rank) >= 50 * world
    for found in (found for rank in ranks for found in rank):
        is_the_run_without(found)
