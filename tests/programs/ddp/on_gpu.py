"""A module on a GPU gets torch's own wrapper for another backend than NCCL, and where
the plugin is missing."""

import logging
from types import SimpleNamespace

import torch
import torch.distributed as dist
from programs.run import rank, tell
from torch import nn

from ctrainer.comm import data_parallel, processes, world

given = []
reasons = []


def wrapper(module, device_ids, **options):  # this machine may have no GPU
    given.extend((device_ids, options))
    return torch.nn.parallel.DistributedDataParallel(module, **options)


class Reasons(logging.Handler):
    def emit(self, record):
        reasons.append(str(record.args[0]))


data_parallel.DistributedDataParallel = wrapper
data_parallel.logger.addHandler(Reasons())
processes.join_run("gloo", "nccl", 30)
for backend in ("gloo", None):
    args = SimpleNamespace(device="cuda:7", ddp_backend=backend, ddp_timeout=30)
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
            reasons,
        ]
    )
