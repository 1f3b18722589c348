"""A group of ranks in two networks."""

import time

import numpy as np
from programs.run import tell

from ctrainer.comm import from_environment

group = from_environment(60.0)
values = np.arange(5001.0) * (group.rank + 1)
group.all_reduce(values)
out = np.zeros(4)
group.all_gather(out, np.array([10.0 + group.rank]))
longer = np.ones(250_000)
began = time.monotonic()
group.all_reduce(longer)
seconds = time.monotonic() - began
alike = bool((longer == 4).all()) and bool((values == np.arange(5001.0) * 10).all())
who = [group.backend, group.rank, group.world_size]
tell([*who, alike, out.tolist(), seconds])
group.barrier()
