"""Ranks that are killed, and those that are left, which form a group anew."""

import os
import signal
import time

import numpy as np
from programs.run import options, rank, tell

from ctrainer.comm import RankFailure, run

group = run.world(60.0)
run.stand_by()
told = []
for victims in options["victims"]:  # of each failure, by the first numbers
    if rank in victims:
        if options.get("forks") and os.fork() == 0:  # as a data loader's worker
            os.close(1), os.close(2)
            time.sleep(45)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            group.all_reduce(np.ones(3))
    except RankFailure as failure:
        said = str(failure)
    if rank == options.get("busy"):
        time.sleep(1.0)  # it computes, and comes all the same
    began = time.monotonic()
    lost = run.regroup(options["progress"][rank]).lost
    group = run.world(60.0)
    ones = np.ones(1)
    group.all_reduce(ones)
    place = run.place()
    told.append(
        {
            "said": said, "lost": lost, "sum": ones[0], "rank": group.rank,
            "place": [place.rank, place.world_size, place.local_rank],
            "seconds": time.monotonic() - began,
        }
    )  # fmt: skip
    tell(told)
