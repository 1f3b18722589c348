"""Groups over MPI, on ranks that MPICH's mpiexec starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent))

pytestmark = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpiexec: pip install mpich mpi4py",
)


def run(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script as 2 ranks of a job, which has to end."""
    path = folder / "rank.py"
    path.write_text(script)
    return subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, str(path), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


OVER_MPI = """
import os, sys, time
import numpy as np
from ctrainer.comm.mpi import communicator

def say(text):
    os.write(1, f"{text}\\n".encode())  # whole, between those of the other rank

group = communicator(timeout_seconds=60.0)
rank, world = group.rank, group.world_size
for name in ("float64", "float32", "float16", "int64", "int32", "int16", "uint8"):
    for op, expected in (("sum", 3), ("mean", 1.5), ("max", 2), ("min", 1)):
        values = np.array([rank + 1, 0], name)
        group.all_reduce(values, op)
        kind = values.dtype.type
        assert values.tolist() == [kind(expected), 0], (name, op, values)
wide = np.array([-3, 3]) * (rank + 1)
group.all_reduce(wide, "mean")
assert wide.tolist() == [-4, 4]  # towards zero
flags = np.array([rank == 0, True, False])
group.all_reduce(flags, "sum")
assert flags.tolist() == [True, True, False]
group.all_reduce(flags, "mean")
out, part = np.zeros(4), np.zeros(2)
group.all_gather(out, np.array([rank, 10.0 + rank]))
assert out.tolist() == [0, 10, 1, 11]
group.reduce_scatter(part, np.arange(4.0) * (rank + 1), "mean")
assert part.tolist() == [[0, 1.5], [3, 4.5]][rank]
group.all_to_all(out, np.arange(4.0) + 10 * rank)
assert out.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
group.broadcast(part, 1)
assert part.tolist() == [3, 4.5]
high = np.array([rank, 1 - rank], np.float16)
group.reduce(high, op="mean")
assert rank or high.tolist() == [0.5, 0.5]
work = group.all_reduce(part, async_op=True)
work.wait()
group.barrier()
assert group.gather_bytes(b"x" * rank) == [b"", b"x"]
turned = group.split(ranks=[1, 0])
turned.all_gather(out, np.array([rank, 10.0 + rank]))
assert out.tolist() == [1, 11, 0, 10]
late = communicator(timeout_seconds=1.0)
group.barrier()
if rank == 0:
    began = time.monotonic()
    try:
        late.all_reduce(part)
    except RuntimeError as error:
        say(error)
    assert time.monotonic() - began < 30
    group.barrier()
else:
    group.barrier()
    late.all_reduce(part)
group.barrier()
assert "torch" not in sys.modules
say(f"done {rank}")
"""


def test_every_collective_over_mpi(tmp_path: Path) -> None:
    done = run(tmp_path, OVER_MPI)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines[0].startswith("all_reduce on rank 0 of 2: another rank did not come")
    assert lines[1:] == ["done 0", "done 1"]


FAULT = """
import os, signal, sys, time
import numpy as np
from ctrainer.comm.mpi import communicator

communicator(timeout_seconds=60.0).barrier()  # all are there
group = communicator(timeout_seconds=60.0 if sys.argv[1] == "dies" else 2.0)
values = np.ones(4)
group.all_reduce(values)
if group.rank == 1 and sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if group.rank == 1 and sys.argv[1] == "stalls":
    time.sleep(1000)
if group.rank == 1:
    raise ValueError("rank 1 gives up")
group.all_reduce(values)
"""


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    done = run(tmp_path, FAULT, "dies")
    assert done.returncode == 9
    assert "Killed (signal 9)" in done.stdout  # MPICH's own words


@pytest.mark.parametrize("fault", ["stalls", "raises"])
def test_a_rank_that_does_not_come_is_told_in_time_and_the_job_ends(
    tmp_path: Path, fault: str
) -> None:
    done = run(tmp_path, FAULT, fault)
    assert done.returncode != 0
    assert (
        "RuntimeError: all_reduce on rank 0 of 2: another rank did not come, or was "
        "not done, within 2 seconds"
    ) in done.stderr
    assert ("ValueError: rank 1 gives up" in done.stderr) == (fault == "raises")
