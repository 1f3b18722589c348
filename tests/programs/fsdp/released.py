"""The last line uses a parameter that has been released, and is watched."""

import torch

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

options = {"watch_released": True, "disable_reshard_on_root": False}
model = FSDP(torch.nn.Linear(2, 2), process_group=_C.Communicator(), **options)
with torch.no_grad():
    model(torch.ones(1, 2))
print("alive", flush=True)
model.module.module.weight.sum().item()
