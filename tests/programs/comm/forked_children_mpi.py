"""Ranks of an MPI job fork children, which end in many ways: folder, seed, how many."""

import os
import sys

import fork_scenarios

from ctrainer.comm.mpi import communicator

folder, seed, n = sys.argv[1:]
group = communicator(timeout_seconds=200.0)
told = fork_scenarios.run(group, folder, int(seed), int(n))
os.write(1, f"whole {len(told)}\n".encode())
