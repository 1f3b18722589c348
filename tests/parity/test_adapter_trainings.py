"""Trainers of adapters, a package for transformers 4.57: losses, weights, events and
files as on transformers' engine, in whole and in resumed runs."""

import pytest
from ranks import run_alone

pytest.importorskip("adapters")


def test_trainings_are_those_on_transformers_engine() -> None:
    done = run_alone("parity.sentence_trainings", "adapters")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.count("ok ") == 2 * 12
    assert "transformers fails" not in done.stdout
