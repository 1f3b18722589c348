"""Two updates with state in a file of the folder that is named, then killed."""

import os
import signal
import sys

import torch

from ctrainer.optim import AdamW

p = torch.nn.Parameter(torch.ones(300_000))
optimizer = AdamW([p])
optimizer.offload_state(sys.argv[1])
for _ in range(2):
    p.grad = torch.ones_like(p)
    optimizer.step()
print("2 updates", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
