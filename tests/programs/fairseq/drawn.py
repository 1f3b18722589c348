"""fairseq's Trainer with drawn options on 2 ranks, one training after the other."""

import gc
import traceback

import drawn_fairseq_trainings as runs
import torch.distributed as dist
from programs.run import folder, join_gloo, options, rank, tell

join_gloo()
results = {}
for number in options["numbers"]:
    case = runs.drawn(number)
    try:
        results[number] = runs.trained(case, f"{folder}/{number}", rank, dist.barrier)
    except Exception:
        results[number] = {"failed": f"{case}\n{traceback.format_exc()}"}
gc.collect()  # torch's wrappers, which keep gloo's threads
tell(results)
