"""Bytes that a machine sends to the other in an update of a sharded model."""

from typing import Any

import torch
from networks import sent_bytes
from programs.run import options, tell
from torch import nn

from ctrainer.comm import from_environment
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

torch.set_num_threads(1)
WIDTH, UPDATES = options["width"], options["updates"]
group = from_environment(60.0)


def made(more: dict[str, Any]) -> FSDP:
    torch.manual_seed(0)
    module: Any = nn.Sequential(
        *[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    )
    kept = {"process_group": group, "on_neuron": False, "flatten_parameters": True}
    for i in range(4):
        module[i] = FSDP(module[i], **kept, **more)
    return FSDP(module, **kept, **more)


def update(model: FSDP, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(2, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def crossed(more: dict[str, Any]) -> tuple[int, list[float]]:
    model = made(more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [update(model, optimizer)]  # the first compares the units
    group.barrier()
    before = sent_bytes()
    group.barrier()
    losses += [update(model, optimizer) for _ in range(UPDATES)]
    group.barrier()
    return (sent_bytes() - before) // UPDATES, losses


tell({name: crossed(more) for name, more in options["cases"].items()})
group.barrier()
