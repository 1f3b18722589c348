"""Groups across machines: "machines" are names that ranks of this one are given."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

from ctrainer import _C

ROOT = Path(__file__).resolve().parent.parent.parent

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


OVER_MPI = """
import sys, time
import numpy as np
from ctrainer.comm.mpi import communicator

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
work = group.all_reduce(part, async_op=True)
work.wait()
group.barrier()
assert group.gather_bytes(b"x" * rank) == [b"", b"x"]
turned = group.split(ranks=[1, 0])
turned.all_gather(out, np.array([rank, 10.0 + rank]))
assert out.tolist() == [1, 11, 0, 10]
late = communicator(timeout_seconds=0.3)
if rank == 0:
    began = time.monotonic()
    try:
        late.all_reduce(part)
    except RuntimeError as error:
        print(error, flush=True)
    assert time.monotonic() - began < 30
    group.barrier()
else:
    group.barrier()
    late.all_reduce(part)
assert "torch" not in sys.modules
print("done", rank, flush=True)
"""


def test_every_collective_over_mpi(tmp_path: Path) -> None:
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpiexec: pip install mpich mpi4py")
    script = tmp_path / "rank.py"
    script.write_text(OVER_MPI)
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines[0].startswith("all_reduce on rank 0 of 2: another rank did not come")
    assert lines[1:] == ["done 0", "done 1"]
