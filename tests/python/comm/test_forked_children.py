"""A child that a rank forks is not the rank: however it ends, the group goes on."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ranks
from draws import draws
from places import PYTHONPATH

from ctrainer.checkpoint import CheckpointWriter
from ctrainer.fairseq.indexed_dataset import MMapIndexedDataset, make_builder
from ctrainer.fairseq.iterators import BufferedIterator

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent))

GROUPS = {"shm": 2, "python": 2, "hierarchical": 4}  # how many ranks each has


@pytest.mark.parametrize("backend", GROUPS)
@pytest.mark.parametrize("seed", range(draws(1, 6)))
def test_groups_outlive_children_however_they_end(
    tmp_path: Path, backend: str, seed: int
) -> None:
    world, n = GROUPS[backend], draws(5, 10)
    options = {"backend": backend, "seed": seed, "n": n}
    made = ranks.run(tmp_path, "comm.forked_children", world, **options)
    first, *others = ranks.told(made)
    assert first[0] == backend
    assert len(first[1]) == n
    assert others == [first] * (world - 1)


@pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpiexec: pip install mpich mpi4py",
)
@pytest.mark.parametrize("seed", range(draws(1, 3)))
def test_groups_over_mpi_outlive_children(tmp_path: Path, seed: int) -> None:
    given = [str(tmp_path), str(seed), str(draws(3, 10))]
    program = [sys.executable, "-m", "programs.comm.forked_children_mpi", *given]
    done = subprocess.run(
        [str(MPIEXEC), "-n", "2", *program],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=ranks.LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"whole {draws(3, 10)}") == 2


@pytest.mark.parametrize(
    ("workers", "persistent"),
    [
        (0, False),
        pytest.param(2, False, marks=pytest.mark.exhaustive),
        (2, True),
    ],
)
def test_a_run_goes_on_while_its_ranks_fork(
    tmp_path: Path, workers: int, persistent: bool
) -> None:
    options = {"workers": workers, "persistent": persistent}
    made = ranks.run(tmp_path, "comm.forked_training", **options)
    assert ranks.told(made) == [True, True]


def _in_child(work: Callable[[], object]) -> int:
    """Run work() in a child that then ends at once: 0, or 1 where it raised."""
    process = os.fork()
    if process == 0:
        signal.alarm(150)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_data_set_that_is_being_written_stays_the_parents(tmp_path: Path) -> None:
    held = [make_builder(str(tmp_path / "data.bin"), "mmap", 100)]
    held[0].add_item(np.arange(9))

    def drop() -> None:
        held.clear()
        gc.collect()

    assert _in_child(drop) == 0
    held[0].add_item(np.arange(5))
    held[0].finalize(str(tmp_path / "data.idx"))
    read = MMapIndexedDataset(str(tmp_path / "data"))
    assert [read[i].tolist() for i in range(2)] == [list(range(9)), list(range(5))]


def test_an_iterator_with_a_thread_is_rejected_in_a_child_and_never_waits() -> None:
    ahead = BufferedIterator(2, list(range(10)))
    assert next(ahead) == 0
    while ahead._channel.items.qsize() < 2:
        time.sleep(0.001)

    def read() -> None:
        assert [next(ahead), next(ahead)] == [1, 2]
        with pytest.raises(RuntimeError, match=f"of process {os.getppid()}; process"):
            next(ahead)

    assert _in_child(read) == 0
    assert list(ahead) == list(range(1, 10))


def test_a_checkpoint_that_is_being_saved_stays_the_parents(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    held = [writer]
    folder = Path(writer.begin(tmp_path / "saved"))
    writer.add_bytes("a.bin", b"a" * 1000)
    del writer

    def drop() -> None:
        with pytest.raises(ValueError, match="no save is open"):
            held[0].add_bytes("b.bin", b"b")
        held.clear()
        gc.collect()

    assert _in_child(drop) == 0
    assert folder.is_dir()
    held[0].commit(wait=True)
    assert (tmp_path / "saved" / "a.bin").read_bytes() == b"a" * 1000
