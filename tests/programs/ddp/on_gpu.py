"""A module on a GPU gets torch's own wrapper where the plugin is missing."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from programs.run import rank, tell
from torch import nn

from ctrainer.comm import data_parallel, world

given = []


def wrapper(module, device_ids, **options):  # this machine may have no GPU
    given.extend((device_ids, options))
    return torch.nn.parallel.DistributedDataParallel(module, **options)


data_parallel.DistributedDataParallel = wrapper
args = SimpleNamespace(device="cuda:7", ddp_backend="gloo", ddp_timeout=30)
for _ in range(2):  # the second finds the group
    module = nn.Linear(1, 1)
    wrapped = data_parallel.on_gpu(module, world(), args, bucket_cap_mb=3)
    wrapped(torch.full((1, 1), 2.0 * rank + 1)).sum().backward()
    tell(
        [
            dist.get_rank(),
            dist.get_world_size(),
            dist.get_backend(),
            given,
            module.weight.grad.item(),
        ]
    )
