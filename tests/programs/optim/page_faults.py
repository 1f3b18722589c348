"""Page faults of 20 blocks of 16 MiB in turn, after a function of _C with a number:
what it returned, and how many."""

import resource
import sys

import numpy as np

from ctrainer import _C

name, value = sys.argv[1:]
applied = getattr(_C, name)(int(value))
np.ones(1 << 22, np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(1 << 22, np.float32)
print(applied, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
