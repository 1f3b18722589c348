"""Communicators over torch's process groups, on processes that talk by gloo."""

from __future__ import annotations

import pytest
from ranks import Rank, run


@pytest.fixture(scope="module", params=["gloo", "beside nccl"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Rank]:
    folder, of_nccl = tmp_path_factory.mktemp("ranks"), request.param != "gloo"
    return run(folder, "comm.process_groups", of_nccl=of_nccl)


def test_every_collective_over_gloo(ranks: list[Rank]) -> None:
    for rank, found in enumerate(r.told for r in ranks):
        assert found["who"] == [rank, 2]
        for name in ("float64", "float32", "bfloat16", "float16"):
            assert [found[f"{name} {op}"][0] for op in ("sum", "mean")] == [3.0, 1.5]
        for name in ("float64", "float16", "int64"):
            assert [found[f"{name} {op}"][0] for op in ("max", "min")] == [2, 1]
        assert [found[f"int64 {op}"] for op in ("sum", "mean")] == [[3, 0], [1, 0]]
        assert found["bool sum"] == found["bool mean"] == [True, False]
        assert found["all_gather"] == [0.0, 10.0, 1.0, 11.0]
        assert found["reduce_scatter"] == [[0.0, 1.5], [3.0, 4.5]][rank]
        parts = [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
        assert found["all_to_all"] == parts[rank]
        assert found["broadcast"] == [1.0]
        assert rank == 0 or found["reduce"] == [0, 1, 2]  # of 0.5, 1.5 and 2.5
        assert found["begun"] == [2.0]
        assert found["gathered"] == ["", "xxx"]
        assert found["sent"] == "of rank 1"
        turned = [1.0, 11.0, 0.0, 10.0]
        assert found["split"] == [1 - rank, 2, turned, "self", rank == 0]


def test_ranks_that_ask_for_different_things_are_told_where_that_is_checked(
    ranks: list[Rank],
) -> None:
    for found in (r.told for r in ranks):
        assert found["differ"] == (
            "all ranks must call the same: rank 0 called barrier of 0 float32 to 0 "
            "(sum, root 0), rank 1 all_reduce of 3 float32 to 0 (sum, root 0)"
        )
        assert found["alike"] == [4.0]


def test_a_rank_that_stays_away_makes_the_other_raise_in_time(
    ranks: list[Rank],
) -> None:
    text, seconds = ranks[0].told["stalled"]
    assert text.startswith("all_reduce on rank 0 of 2: ")
    assert seconds < 30  # the time-out is 3


def test_a_rank_that_dies_makes_the_other_raise_at_once(ranks: list[Rank]) -> None:
    assert [r.code for r in ranks] == [0, 3]
    text, seconds = ranks[0].told["died"]
    assert text.startswith("all_reduce on rank 0 of 2: ")
    assert seconds < 30  # the group would wait a minute


def test_without_a_group_there_is_no_communicator() -> None:
    pytest.importorskip("torch")
    from ctrainer.comm.process_group import communicator

    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        communicator()
