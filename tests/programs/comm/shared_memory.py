"""A group of 2 ranks in shared memory, without torch."""

import sys

import numpy as np
import pytest

from ctrainer.comm import from_environment

for _ in range(2):
    group = from_environment(120.0)
    values = np.arange(100001.0) * (group.rank + 1)
    group.all_reduce(values, "mean")
    assert (values == np.arange(100001.0) * 1.5).all()
    parts = np.zeros(2, np.int64)
    group.all_gather(parts, np.array([group.rank * 7]))
    wide = np.full(4, -1)
    assert group.all_gather_padded(wide, np.arange(1, 3)[group.rank :]) == [2, 1]
    assert wide.tolist() == [1, 2, 2, 0]
    assert "torch" not in sys.modules
half = from_environment(120.0, ranks=[1, 0])
half.all_gather(parts, np.array([group.rank * 7]))
assert parts.tolist() == [7, 0]
assert half.rank == 1 - group.rank
assert from_environment(ranks=[group.rank]).backend == "self"
half.broadcast_bytes(b"x", 0)
turned = group.split(ranks=[1, 0]).split(7, key=0)
assert (turned.rank, turned.world_size, turned.backend) == (1 - group.rank, 2, "shm")
turned.all_gather(parts, np.array([group.rank * 7]))
assert parts.tolist() == [7, 0]
assert turned.split(turned.rank).backend == "self"
assert (group.split(0 if group.rank else None) is None) == (group.rank == 0)
memory = group.memory(80008)
shared, whole = np.frombuffer(memory), np.zeros(20002)
shared[:] = np.arange(10001.0) + group.rank
group.all_gather(whole, shared)
assert (whole[:10001] == np.arange(10001.0)).all()
assert whole[-1] == 10001.0
group.all_reduce(shared)
assert memory.is_shared
assert (shared == np.arange(10001.0) * 2 + 1).all()
shared[0] = 5.0 + group.rank
theirs = memory.of_rank(1 - group.rank)
group.barrier()
assert theirs.readonly
assert np.frombuffer(theirs)[0] == 6.0 - group.rank
assert len(theirs) == 80008
assert bytes(memory.of_rank(group.rank)) == bytes(memory)
for absent in (-1, 2):
    with pytest.raises(ValueError, match=f"the group has no rank {absent}$"):
        memory.of_rank(absent)
with pytest.raises(ValueError, match="its own memory alone"):
    theirs.obj.discard()
group.barrier()
del memory, shared
assert np.frombuffer(theirs)[1] in (0.0, 3.0)  # dropped there, or not yet
group.all_gather(parts, np.array([group.rank * 7]))
print(group.backend, group.rank, group.world_size, parts.tolist())
