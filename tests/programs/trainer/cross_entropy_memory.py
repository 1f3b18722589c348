"""Prints by how many MiB a step grows the process: "chunked", or of all logits."""

import sys

import torch

from ctrainer import linear_cross_entropy


def peak() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def step(rows: int) -> None:
    hidden = torch.randn(rows, 24, requires_grad=True)
    weight = torch.randn(32768, 24, requires_grad=True)
    labels = torch.randint(0, 32768, (rows,))
    if sys.argv[1] == "chunked":
        loss = linear_cross_entropy(hidden, weight, labels)
    else:
        loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    loss.backward()


step(16)
before = peak()
step(4096)
print(peak() - before)
