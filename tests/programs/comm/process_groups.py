"""Every collective over a gloo group of 2 ranks, and the end of one; and by gloo beside
a group that says that it is NCCL's."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from programs.run import join_gloo, options, rank, tell

from ctrainer.comm import process_group
from ctrainer.comm.process_group import communicator

join_gloo()
if options["of_nccl"]:
    gloo, backend_of = dist.group.WORLD, dist.get_backend
    begin = process_group.ProcessGroupBackend.begin

    def begin_beside(self, *request):
        assert self.group is not gloo
        return begin(self, *request)

    process_group._GPU = torch.device("cpu")
    process_group.ProcessGroupBackend.begin = begin_beside
    dist.get_backend = lambda group: "nccl" if group is gloo else backend_of(group)

group = communicator()
found = {"who": [group.rank, group.world_size]}
for name in ("float64", "float32", "bfloat16", "float16", "int64", "bool"):
    kind = getattr(torch, name)
    for op in ("sum", "mean", "max", "min"):
        values = torch.tensor([rank + 1, 0]).to(kind)
        group.all_reduce(values, op)
        found[f"{name} {op}"] = values.tolist()
out = torch.zeros(4)
group.all_gather(out, torch.tensor([rank, 10.0 + rank]))
found["all_gather"] = out.tolist()
part = torch.zeros(2)
group.reduce_scatter(part, torch.arange(4.0) * (rank + 1), "mean")
found["reduce_scatter"] = part.tolist()
group.all_to_all(out, torch.arange(4.0) + 10 * rank)
found["all_to_all"] = out.tolist()
values = torch.tensor([float(rank)])
group.broadcast(values, 1)
found["broadcast"] = values.tolist()
sums = torch.arange(3) + rank
group.reduce(sums, 1, "mean")
found["reduce"] = sums.tolist()
group.barrier()
first = group.all_reduce(torch.ones(3), async_op=True)
second = group.all_reduce(values, async_op=True)
first.wait()
second.wait()
found["begun"] = values.tolist()
found["gathered"] = [b.decode() for b in group.gather_bytes(b"x" * (3 * rank))]
found["sent"] = group.broadcast_bytes(b"of rank 1" if rank else None, 1).decode()

# What ranks ask for is compared where that is wished for.
os.environ["CTRAINER_CHECK_COLLECTIVES"] = "1"
checked = communicator()
try:
    checked.all_reduce(torch.ones(3), async_op=True) if rank else checked.barrier()
except ValueError as error:
    found["differ"] = str(error)
checked.all_reduce(values)
found["alike"] = values.tolist()
half = group.split(ranks=[1, 0])
half.all_gather(out, torch.tensor([rank, 10.0 + rank]))
alone = group.split(color=rank)
none = group.split(0 if rank else None)
found["split"] = [half.rank, half.world_size, out.tolist(), alone.backend, none is None]
half.close()

# A group of which rank 1 stays away until rank 0 has run into the time-out
stalled = communicator(dist.new_group(timeout=timedelta(seconds=3)))
group.barrier()
stalled.barrier()
if rank == 0:
    began = time.monotonic()
    try:
        stalled.all_reduce(torch.ones(1))
    except RuntimeError as error:
        found["stalled"] = [str(error), time.monotonic() - began]

# Then it dies, which shows at once in the group whose time-out is a minute
group.barrier()
if rank == 1:
    tell(found)
    os._exit(3)
began = time.monotonic()
try:
    group.all_reduce(torch.ones(1))
except RuntimeError as error:
    found["died"] = [str(error), time.monotonic() - began]
tell(found)
os._exit(0)
