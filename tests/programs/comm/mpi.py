"""Every collective over MPI, on 2 ranks."""

import os
import sys
import time

import numpy as np

from ctrainer.comm.mpi import communicator


def say(text):
    os.write(1, f"{text}\n".encode())  # whole, between those of the other rank


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
