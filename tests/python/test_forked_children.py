"""A child that a rank forks is not the rank: however it ends, the group goes on."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import ranks
from draws import draws

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent))

# How many ranks a group has, and how it is made.
GROUPS = {
    "shm": (2, "from ctrainer.comm import world\ngroup = world(60.0)\n"),
    "python": (
        2,
        ranks.GLOO
        + "from ctrainer.comm.process_group import communicator\n"
        + "group = communicator()\n",
    ),
    "levels": (
        4,
        ranks.GLOO
        + "from ctrainer.comm.machines import over_machines\n"
        + "from ctrainer.comm.process_group import communicator\n"
        + "group = over_machines(communicator(), 60.0, machine=str(rank // 2))\n",
    ),
}
CHILDREN = """
import fork_scenarios
told = fork_scenarios.run(group, folder, {seed}, {n})
"""


@pytest.mark.parametrize("backend", GROUPS)
@pytest.mark.parametrize("seed", range(draws(1, 6)))
def test_groups_outlive_children_however_they_end(
    tmp_path: Path, backend: str, seed: int
) -> None:
    world, join = GROUPS[backend]
    body = join + CHILDREN.format(seed=seed, n=10) + "tell([group.backend, told])\n"
    first, *others = ranks.told(ranks.run_ranks(tmp_path, body, world))
    assert first[0] == backend
    assert len(first[1]) == 10
    assert others == [first] * (world - 1)


@pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpiexec: pip install mpich mpi4py",
)
@pytest.mark.parametrize("seed", range(draws(1, 3)))
def test_groups_over_mpi_outlive_children(tmp_path: Path, seed: int) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\n"
        "from ctrainer.comm.mpi import communicator\n"
        "group = communicator(timeout_seconds=60.0)\n"
        f"folder = {str(tmp_path)!r}\n"
        + CHILDREN.format(seed=seed, n=10)
        + "os.write(1, f'whole {len(told)}\\n'.encode())\n"
    )
    paths = os.pathsep.join([str(ranks.ROOT), str(ranks.ROOT / "tests")])
    done = subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=ranks.LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("whole 10") == 2
