"""Two updates with shards in files of the folder that is named, then killed."""

import os
import signal
import sys

import torch

from ctrainer.fsdp import FullyShardedDataParallel
from ctrainer.optim import AdamW

model = FullyShardedDataParallel(torch.nn.Linear(300, 300), shard_folder=sys.argv[1])
optimizer = AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
print("2 updates", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
