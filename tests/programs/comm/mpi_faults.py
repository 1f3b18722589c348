"""A rank of an MPI job that is killed, stalls or raises."""

import os
import signal
import sys
import time

import numpy as np

from ctrainer.comm.mpi import communicator

communicator(timeout_seconds=60.0).barrier()  # all are there
group = communicator(timeout_seconds=60.0 if sys.argv[1] == "dies" else 2.0)
values = np.ones(4)
group.all_reduce(values)
if group.rank == 1 and sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if group.rank == 1 and sys.argv[1] == "stalls":
    time.sleep(1000)
if group.rank == 1:
    raise ValueError("rank 1 gives up")
group.all_reduce(values)
