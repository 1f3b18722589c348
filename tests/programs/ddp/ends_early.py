"""One rank's loop ends early, or the rank is killed."""

import os
import signal
import time

import torch
from programs.run import options, rank, tell
from torch import nn

from ctrainer import DataParallel

torch.manual_seed(0)
model = DataParallel(nn.Linear(6, 4))
began = time.monotonic()
try:
    for _ in range(2 + (rank != 1)):
        model(torch.ones(3, 6)).sum().backward()
    if rank == 1 and options["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
except RuntimeError as error:
    tell([str(error), time.monotonic() - began])
