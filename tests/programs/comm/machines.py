"""Groups over 4 ranks on 2 machines of 2."""

import numpy as np
from programs.run import folder, rank, tell

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
