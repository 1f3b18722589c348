"""Groups across machines: "machines" are names that ranks of this one are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks

from ctrainer import _C


def test_two_machines_of_two_ranks(tmp_path: Path) -> None:
    told = ranks.told(ranks.run(tmp_path, "comm.machines", world=4))
    for rank, found in enumerate(told):
        assert found["who"] == ["hierarchical", rank, 4]
        assert found["all_reduce"]
        assert found["mean"] == [1.5]
        assert found["reduce_scatter"] == [20.0 * rank, 20.0 * rank + 10]
        assert found["all_gather"] == [10.0, 11.0, 12.0, 13.0]
        assert found["all_to_all"] == [rank, 10.0 + rank, 20.0 + rank, 30.0 + rank]
        assert found["broadcast"] == [3.0, 13.0, 23.0, 33.0]
        assert found["bytes"] == ["", "x", "xx", "xxx"]
        assert found["split"] == [rank // 2, 2, 2]
        assert found["memory"]
        assert found["several"] == [True, True, True]
        # A machine each, ranks that alternate, and 1 rank beside 3: the engine alone.
        assert found["others"] == ["shm", "shm", "shm"]
        assert found["same"] == ["shm", 4]


def test_groups_that_do_not_fit_together_are_named() -> None:
    one, two = _C.Communicator(), _C.Communicator()
    with pytest.raises(ValueError, match="must be three groups"):
        _C.hierarchical_communicator(one, one, two)
    whole = _C.Communicator(Backend())
    with pytest.raises(ValueError, match="rank 1 of 2 cannot be rank 0 of the 1"):
        _C.hierarchical_communicator(one, two, whole)
    with pytest.raises(ValueError, match="closed"):
        one.barrier()


class Backend:
    """Rank 1 of 2."""

    rank, world_size = 1, 2
