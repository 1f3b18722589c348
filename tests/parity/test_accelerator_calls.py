"""Calls of a script on trainer.accelerator on two ranks, and its own loop with it: as
with transformers' Trainer, also where ours has sharded the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ranks import run, told

NUMBERS = ("norms", "kept", "parameters", "own loop", "again", "reference")


def calls(folder: Path, engine: str, shards: bool = False) -> Any:
    """What each rank told, and what the tracker wrote."""
    ranks = run(folder, "parity.accelerator_calls", engine=engine, shards=shards)
    return told(ranks), json.loads((folder / "run.json").read_text())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return calls(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.mark.parametrize(
    "shards", [pytest.param(False, marks=pytest.mark.exhaustive), True]
)
def test_calls_of_a_script_do_what_they_do_in_transformers(
    shards: bool, theirs: Any, tmp_path: Path
) -> None:
    ours, tracked = calls(tmp_path, "ours", shards)
    others, told_to_theirs = theirs
    for mine, other in zip(ours, others, strict=True):
        for key in NUMBERS:
            # a few ulp of float32 an update: sums and means are taken in another order
            assert numbers(mine.pop(key)) == pytest.approx(
                numbers(other[key]), rel=1e-5, abs=2e-6
            ), key
        assert mine == {k: v for k, v in other.items() if k not in NUMBERS}
    # beside total_flos: docs/start/from_transformers.md
    assert [what if i == "config" else [n for n in what if n != "total_flos"]
            for i, what in tracked] == [what for _, what in told_to_theirs]  # fmt: skip


def numbers(nested: Any) -> list[float]:
    if not isinstance(nested, list):
        return [float(nested)]
    return [number for inner in nested for number in numbers(inner)]
