"""`fairseq-train` on two workers of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fairseq_program as program

ROOT = Path(__file__).resolve().parents[2]
# Three epochs without dropout, whose masks depend on how batches are dealt out.
PLAIN = ("--max-epoch", "3", "--dropout", "0", "--attention-dropout", "0")
LAUNCHER = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.preprocess(tmp_path_factory.mktemp("text"))


def run(arguments: list[str]) -> list[Any]:
    """Run the program in processes of its own; what the first worker logged."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    done = subprocess.run(
        [sys.executable, "-m", "ctrainer", *arguments],
        cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(" | ", 3) for line in done.stdout.splitlines()]
    return program.numbers([(line[2], line[3]) for line in lines if len(line) == 4])


def test_two_workers_log_what_one_does_with_twice_the_update_freq(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches are dealt out in turn, so an update sees the same ones; the last update
    of an epoch has a dummy batch where their number is odd."""
    two = run(
        program.lm_arguments(
            data, tmp_path / "two", "--distributed-world-size", "2", *PLAIN
        )
    )
    one = program.train(
        caplog,
        program.lm_arguments(data, tmp_path / "one", "--update-freq", "2", *PLAIN),
    )
    assert [name for name, _ in two] == [name for name, _ in one]
    assert len(two) > 8
    for (_, ours), (_, theirs) in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            # 3 digits are logged, and gradients are added in another order
            assert float(ours[key]) == pytest.approx(float(value), rel=2e-3, abs=2e-3)
    saved = sorted(p.name for p in (tmp_path / "two").iterdir())
    assert saved == sorted(p.name for p in (tmp_path / "one").iterdir())
