"""Groups of the processes of one machine, from what launchers say and by key."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import time
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from ranks import started, torchrun

from ctrainer import _C
from ctrainer.comm import from_environment
from ctrainer.comm.environment import place_of, set_local_rendezvous

TIMEOUT = 150


def start_ranks(program: str) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    """Two ranks of a run; their standard input stays open."""
    run = uuid.uuid4().hex
    environs = [torchrun(rank, 2, run) for rank in range(2)]
    return started(["-m", f"programs.{program}"], environs, stdin=subprocess.PIPE)


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    return [process.communicate(timeout=TIMEOUT)[0].strip() for process in processes]


def test_ranks_of_a_launcher_meet_in_shared_memory_without_torch() -> None:
    with start_ranks("comm.shared_memory") as both:
        assert outputs(both) == ["shm 0 2 [0, 7]", "shm 1 2 [0, 7]"]


def traces() -> set[str]:
    """What the groups of this user have in the machine's name spaces just now."""
    sockets = Path("/proc/net/unix").read_text()
    names = re.findall(rf"ctrainer-{os.geteuid()}-\w+", sockets)
    return {*names, *(n for n in os.listdir("/dev/shm") if "ctrainer" in n)}


def test_a_killed_rank_is_named_and_leaves_nothing_behind() -> None:
    with start_ranks("comm.shared_memory_killed") as both:
        assert both[1].stdout is not None
        assert both[1].stdout.readline() == "ready\n"
        began = time.monotonic()
        both[1].send_signal(signal.SIGKILL)
        text = outputs(both)[0]
    assert time.monotonic() - began < 60  # of a time-out of 300 seconds
    assert text.startswith("ready\nall_reduce on rank 0 of 2: rank 1 (process ")
    assert text.endswith(") died")
    left = traces()
    while left and time.monotonic() - began < TIMEOUT:
        time.sleep(0.05)
        left &= traces()  # other tests' groups are gone when their ranks have met
    assert not left


def test_ctrl_c_ends_a_wait_and_tells_the_other_ranks() -> None:
    with start_ranks("comm.shared_memory_interrupted") as (first, second):
        assert first.stdout is not None
        assert first.stdout.readline() == "interrupted 1.0\n"
        text = second.communicate("go\n", timeout=TIMEOUT)[0]
        first.communicate(timeout=TIMEOUT)
    assert text.startswith("all_reduce on rank 1 of 2: rank 0 (process ")
    assert text.endswith(") was interrupted\n")
    assert [rank.returncode for rank in (first, second)] == [0, 0]


def test_without_a_launcher_a_process_is_alone() -> None:
    group = from_environment(environ={})
    assert (group.rank, group.world_size, group.backend) == (0, 1, "self")
    group = from_environment(environ=torchrun(0, 1, "alone"))
    assert (group.rank, group.world_size, group.backend) == (0, 1, "self")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            ("torchrun", 1, 4, False),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
            ("torchrun", 1, 4, True),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7"},
            ("torchrun", 1, 4, False),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            ("Open MPI", 0, 2, True),
        ),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"},
            ("MPICH", 2, 3, True),
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},
            ("SLURM", 5, 8, False),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_NTASKS": "8",
                "SLURM_NNODES": "2",
                "SLURM_STEP_NUM_NODES": "1",
            },
            ("SLURM", 5, 8, True),
        ),
    ],
)
def test_each_launcher_says_who_we_are(
    environ: dict[str, str], expected: tuple[str, int, int, bool]
) -> None:
    place = place_of(environ)
    assert place is not None
    assert (
        place.launcher,
        place.rank,
        place.world_size,
        place.on_one_machine,
    ) == expected


def test_ranks_that_mpirun_started_here_get_a_place_to_meet() -> None:
    job = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PMI_PORT": "host:4711"}
    met = []
    for rank in "01":
        environ = {"PMI_RANK": rank, **job}
        set_local_rendezvous(environ)
        met.append((environ["MASTER_ADDR"], environ["MASTER_PORT"]))
    assert met[0] == met[1]
    assert met[0][0] == "127.0.0.1"
    assert 20000 <= int(met[0][1]) < 32000
    given = {"PMI_RANK": "0", **job, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5"}
    set_local_rendezvous(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.7", "5")
    spread = {"PMI_RANK": "0", **job, "MPI_LOCALNRANKS": "1"}
    set_local_rendezvous(spread)
    assert "MASTER_ADDR" not in spread


def test_jobs_and_their_restarts_have_keys_of_their_own() -> None:
    first = place_of(torchrun(0, 2, "a"))
    other = place_of(torchrun(0, 2, "b"))
    again = place_of({**torchrun(1, 2, "a"), "TORCHELASTIC_RESTART_COUNT": "1"})
    assert first is not None
    assert other is not None
    assert again is not None
    assert len({first.key, other.key, again.key}) == 3
    same = place_of(torchrun(1, 2, "a"))
    assert same is not None
    assert same.key == first.key


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"the rank must be in \[0, 2\)"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_NNODES is not set"),
    ],
)
def test_variables_that_make_no_sense_are_named(
    environ: dict[str, str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        place_of(environ)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0, 0], "ranks must be different"),
        ([0, 2], r"in \[0, 2\), got \(0, 2\)"),
        ([1], r"rank 0 is not among the group's ranks \(1,\)"),
    ],
)
def test_ranks_that_are_no_group_are_named(ranks: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_environment(environ=torchrun(0, 2, "x"), ranks=ranks)


def test_ranks_on_several_machines_need_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="set MASTER_ADDR and MASTER_PORT"):
        from_environment(
            environ={"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
        )


def test_bad_arguments_and_absent_ranks_are_named() -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        _C.shared_memory_communicator("test", 2, 2, 1.0)
    with pytest.raises(ValueError, match="timeout_seconds must be above 0"):
        _C.shared_memory_communicator("test", 0, 2, 0.0)
    key = uuid.uuid4().hex
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .* within 0.1 seconds"):
        _C.shared_memory_communicator(key, 0, 2, 0.1)


def test_memory_of_a_group_is_a_buffer_that_outlives_it() -> None:
    page = mmap.PAGESIZE
    alone = _C.Communicator()
    for group in (alone, _C.shared_memory_communicator(uuid.uuid4().hex, 0, 1, 1.0)):
        memory = group.memory(2 * page + 8)
        assert memory.nbytes == 2 * page + 8 == memoryview(memory).nbytes
        assert memory.is_shared == (group is not alone)
        values = np.frombuffer(memory)
        values[:] = 1.0
        group.all_reduce(values)
        group.close()
        memory.discard(page)
        assert values[:512].sum() == 512.0
        assert values[512:].sum() == 0.0
        values[-1] = 2.0
        memory.discard(0, page)
        assert (values[0], values[-1]) == (0.0, 2.0)
        for offset, nbytes in ((1, page), (0, 4 * page), (5 * page, None), (-page, 0)):
            with pytest.raises(ValueError, match="bytes"):
                memory.discard(offset, nbytes)
        del memory
        assert values[-1] == 2.0


@pytest.mark.parametrize("nbytes", [0, -1])
def test_memory_of_no_bytes_is_rejected(nbytes: int) -> None:
    shared = _C.shared_memory_communicator(uuid.uuid4().hex, 0, 1, 1.0)
    for group in (_C.Communicator(), shared):
        with pytest.raises(ValueError, match="bytes"):
            group.memory(nbytes)


def test_memory_of_one_process_is_no_other_ranks() -> None:
    memory = _C.Communicator().memory(8)
    with pytest.raises(ValueError, match="do not share memory; use all_gather"):
        memory.of_rank(0)


def test_one_rank_shares_memory_with_itself() -> None:
    group = _C.shared_memory_communicator(uuid.uuid4().hex, 0, 1, 1.0)
    values = np.arange(3.0)
    group.all_reduce(values, "mean")
    assert values.tolist() == [0.0, 1.0, 2.0]
    assert group.gather_bytes(b"abc") == [b"abc"]
    group.close()
    with pytest.raises(ValueError, match="closed"):
        group.barrier()
