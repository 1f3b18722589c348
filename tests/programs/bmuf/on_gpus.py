"""Blocks of local steps on a GPU of each rank, whose sums travel over NCCL, and on the
host."""

from typing import Any

import any_gpu
from enqueued import Measured, run
from programs.run import folder, rank, tell

from ctrainer.comm import world

any_gpu.device()
BLOCKS: dict[str, Any] = {
    "use_bmuf": True, "block_momentum": 0.5, "global_sync_iter": 3,
    "warmup_iterations": 0, "max_grad_norm": 0.0,
}  # fmt: skip
made = [
    run(f"{folder}/{cpu}", Measured, set(), use_cpu=cpu, **BLOCKS)[0]
    for cpu in (False, True)
]
found = [[p.detach().cpu().tolist() for p in m.model.parameters()] for m in made]
tell({"gpu": world().gpu == rank, "same": found[0] == found[1], "weights": found[0]})
