"""Groups over MPI, on ranks that MPICH's mpiexec starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import PYTHONPATH

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent))

pytestmark = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpiexec: pip install mpich mpi4py",
)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program as 2 ranks of a job, which has to end."""
    return subprocess.run(
        [
            str(MPIEXEC),
            "-n",
            "2",
            sys.executable,
            "-m",
            f"programs.{program}",
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_every_collective_over_mpi() -> None:
    done = run("comm.mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines[0].startswith("all_reduce on rank 0 of 2: another rank did not come")
    assert lines[1:] == ["done 0", "done 1"]


def test_a_killed_rank_ends_the_job() -> None:
    done = run("comm.mpi_faults", "dies")
    assert done.returncode == 9
    assert "Killed (signal 9)" in done.stdout  # MPICH's own words


@pytest.mark.parametrize("fault", ["stalls", "raises"])
def test_a_rank_that_does_not_come_is_told_in_time_and_the_job_ends(
    fault: str,
) -> None:
    done = run("comm.mpi_faults", fault)
    assert done.returncode != 0
    assert (
        "RankFailure: all_reduce on rank 0 of 2: another rank did not come, or was "
        "not done, within 2 seconds"
    ) in done.stderr
    assert ("ValueError: rank 1 gives up" in done.stderr) == (fault == "raises")
