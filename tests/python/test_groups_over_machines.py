"""Groups across machines: "machines" are names that ranks of this one are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks

from ctrainer import _C

LEVELS = """
import numpy as np
from ctrainer import _C
from ctrainer.comm.machines import over_machines

engine = _C.shared_memory_communicator(folder, rank, 4, 60.0)
group = over_machines(engine.split(0), 60.0, f"machine {rank // 2}")
found = {"who": [group.backend, group.rank, group.world_size]}
values = np.arange(5001.0) * (rank + 1)
group.all_reduce(values)
found["all_reduce"] = bool((values == np.arange(5001.0) * 10).all())
half = np.full(3001, rank, np.float16)
group.all_reduce(half, "mean")
found["mean"] = np.unique(half).tolist()
part = np.zeros(2)
group.reduce_scatter(part, np.arange(8.0) * (rank + 1))
found["reduce_scatter"] = part.tolist()
out = np.zeros(4)
group.all_gather(out, np.array([10.0 + rank]))
found["all_gather"] = out.tolist()
group.all_to_all(out, np.arange(4.0) + 10 * rank)
found["all_to_all"] = out.tolist()
group.broadcast(out, 3)
found["broadcast"] = out.tolist()
found["bytes"] = [b.decode() for b in group.gather_bytes(b"x" * rank)]
work = group.all_reduce(part, async_op=True)
work.wait()
several = [np.arange(5001.0) * (rank + k) for k in range(3)]
works = [group.all_reduce(each, async_op=True) for each in several]
group.barrier()
for work in works:
    work.wait()
found["several"] = [
    bool((each == np.arange(5001.0) * (6 + 4 * k)).all())
    for k, each in enumerate(several)
]
group.barrier()
odd = group.split(rank % 2)
found["split"] = [odd.rank, odd.world_size, len(odd.gather_bytes(b""))]
found["memory"] = group.memory(4096).is_shared
found["others"] = [
    over_machines(engine.split(0), 60.0, name).backend
    for name in (str(rank), str(rank % 2), str(rank > 0))
]
same = over_machines(engine, 60.0)
found["same"] = [same.backend, same.world_size]
same.barrier()
tell(found)
"""


def test_two_machines_of_two_ranks(tmp_path: Path) -> None:
    told = ranks.told(ranks.run_ranks(tmp_path, LEVELS, world=4))
    for rank, found in enumerate(told):
        assert found["who"] == ["levels", rank, 4]
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
        _C.two_level_communicator(one, one, two)
    whole = _C.Communicator(Backend())
    with pytest.raises(ValueError, match="rank 1 of 2 cannot be rank 0 of the 1"):
        _C.two_level_communicator(one, two, whole)
    with pytest.raises(ValueError, match="closed"):
        one.barrier()


class Backend:
    """Rank 1 of 2."""

    rank, world_size = 1, 2
