"""The ranks that are left when others are killed find each other."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import ranks
from rank_threads import on_ranks

from ctrainer import _C
from ctrainer.comm import run
from ctrainer.comm.survivors import Standby


def outlived(folder: Path, world: int, **options: Any) -> list[Any]:
    """What each rank that is left told, by its first number."""
    dead = {rank for victims in options["victims"] for rank in victims}
    done = ranks.run(folder, "comm.outlived", world, **options)
    for rank, found in enumerate(done):
        assert found.code == (-9 if rank in dead else 0), found.output
    return [None if rank in dead else one.told for rank, one in enumerate(done)]


@pytest.mark.parametrize("victims", [[0], [2, 3], [0, 1, 3]])
def test_those_that_are_left_are_a_group_in_their_order(
    victims: list[int], tmp_path: Path
) -> None:
    told = outlived(tmp_path, 4, victims=[victims], progress=[7] * 4)
    left = [rank for rank in range(4) if rank not in victims]
    for number, rank in enumerate(left):
        (found,) = told[rank]
        assert f"all_reduce on rank {rank} of 4: rank " in found["said"]
        assert found["lost"] == victims
        assert found["sum"] == len(left)
        assert found["rank"] == number
        assert found["place"] == [number, len(left), number]
        assert found["seconds"] < 30


def test_the_furthest_is_the_first_and_one_that_is_busy_is_waited_for(
    tmp_path: Path,
) -> None:
    told = outlived(tmp_path, 4, victims=[[1]], progress=[4, 0, 4, 5], busy=2)
    assert [told[rank][0]["rank"] for rank in (3, 0, 2)] == [0, 1, 2]


def test_children_of_the_dead_are_not_waited_for(tmp_path: Path) -> None:
    told = outlived(tmp_path, 3, victims=[[0]], progress=[1] * 3, forks=True)
    assert told[1][0]["seconds"] < 30


@pytest.mark.parametrize(
    ("parts", "progress", "holders", "members"),
    [
        ([0, 1, 0, 1], [4, 4, 4, 4], [0, 1], [0, 1, 2, 3]),
        ([0, 1, 0, 1], [4, 4, 5, 5], [2, 3], [2, 3, 0, 1]),
        ([0, 1, 0, 1], [4, 5, 5, 4], [2, 1], [1, 2, 0, 3]),
        ([0, 1, 0, 1], [5, 4, 4, 4], [2, 1], [1, 2, 3, 0]),  # part 1 of 5 is nowhere
        ([0, -1, 0, 1], [4, 4, 4, 4], [0, 3], [0, 2, 3, 1]),
        ([0, -1, 0, -1], [4, 4, 4, 4], [], [0, 1, 2, 3]),
    ],
)
def test_ranks_that_have_all_parts_come_first(
    parts: list[int], progress: list[int], holders: list[int], members: list[int]
) -> None:
    def meet(group: _C.Communicator) -> None:
        standby = Standby(group, "127.0.0.1")
        met = standby.meet(progress[group.rank], 30.0, parts[group.rank], 2)
        assert (met.holders, met.members) == (holders, members)
        held = {progress[rank] for rank in holders}
        assert met.progress == (held.pop() if held else None)

    on_ranks(4, meet)


def test_another_program_that_connects_is_left_out() -> None:
    def meet(group: _C.Communicator) -> None:
        standby = Standby(group, "127.0.0.1")
        host, port, _ = standby._peers[0]
        if group.rank == 1:
            others = [socket.create_connection((host, port)) for _ in JUNK]
            for other, junk in zip(others, JUNK, strict=True):
                other.sendall(junk)
        assert standby.meet(1, 30.0).members == [0, 1]

    on_ranks(2, meet)


JUNK = (b"GET / HTTP/1.1\r\n\n", b"[]\n", b'{"rank": 7}\n', b"x" * 5000,
        b'{"rank": 2, "progress": 1, "port": 1}\n')  # fmt: skip


def test_another_may_die_later(tmp_path: Path) -> None:
    told = outlived(tmp_path, 4, victims=[[0], [2]], progress=[1, 1, 1, 1])
    assert [[each["rank"] for each in told[rank]] for rank in (1, 3)] == [
        [0, 0],
        [2, 1],
    ]
    assert [each["lost"] for each in told[1]] == [[0], [1]]
    assert [each["sum"] for each in told[1]] == [3, 2]


def test_mpirun_ends_all_ranks_and_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="here it is Open MPI"):
        run.stand_by()
