"""A rank that comes seconds after the others to an all_reduce."""

import os
import time

import numpy as np
from programs.run import join_gloo, options, rank, tell

if options["over"] == "gloo":
    join_gloo()
    from ctrainer.comm import process_group

    group = process_group.communicator()
else:
    from ctrainer.comm import from_environment

    group = from_environment(60.0)
values = np.ones(4)
group.all_reduce(values)
if rank == 1:
    time.sleep(options["seconds"])
group.all_reduce(values)
tell([values.tolist(), os.getpid()])
group.barrier()
