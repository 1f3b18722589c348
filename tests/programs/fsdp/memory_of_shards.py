"""Prints the memory that sharding and two updates add, with shards in files of the
folder that is named, or in memory."""

import sys
from typing import Any

import torch

from ctrainer.fsdp import FullyShardedDataParallel
from ctrainer.optim import SGD


def resident() -> int:
    """Bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def wrap(module: torch.nn.Module) -> Any:
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    return FullyShardedDataParallel(module, shard_folder=folder, read_ahead=2)


def trained(width: int, depth: int) -> Any:
    layers = [wrap(torch.nn.Linear(width, width)) for _ in range(depth)]
    model = wrap(torch.nn.Sequential(*layers))
    optimizer = SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


small = trained(10, 3)  # what torch takes at the first use
before = resident()
large = trained(1000, 12)
print(resident() - before)
