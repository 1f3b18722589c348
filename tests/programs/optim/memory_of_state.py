"""Prints the memory that two updates add, with state in memory and in a file."""

import torch

from ctrainer.optim import AdamW


def resident() -> int:
    """Bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def added(offloads: bool) -> int:
    params = [torch.nn.Parameter(torch.ones(1_000_000)) for _ in range(10)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = AdamW(params)
    if offloads:
        optimizer.offload_state("/tmp")
    before = resident()
    for _ in range(2):
        optimizer.step()
    return resident() - before


in_a_file = added(True)
print(added(False), in_a_file)
