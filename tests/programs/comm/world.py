"""The group of the run: joined once a process, left, joined again."""

import os
import sys
import time

import numpy as np
from programs.run import tell

from ctrainer.comm import run, world
from ctrainer.training_args import TrainingArguments

args = TrainingArguments(sys.argv[1], ddp_timeout=120, disable_tqdm=True)
with args.main_process_first(local=False):
    made = os.path.exists(sys.argv[1] + "/made")
    assert made == (args.process_index > 0)
    time.sleep(0 if made else 0.5)  # who does not wait comes in between
    open(sys.argv[1] + "/made", "w").close()
group = world()
assert group is world(1.0)
assert (group.backend, group.rank, group.world_size) == (
    "shm",
    args.process_index,
    args.world_size,
)
child = os.fork()
if child == 0:
    alone = world()
    os._exit((alone.world_size != 1) + 2 * (run.place().rank != 0))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
group.barrier()
run.leave()
again = world(30.0)
assert again is not group
values = np.array([2.0 * again.rank + 1.0])
again.all_reduce(values)
assert values[0] == 4.0
assert "torch" not in sys.modules
tell(f"done {args.process_index}")
