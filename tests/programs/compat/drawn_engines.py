"""DeepSpeed's engine with drawn options on 2 ranks, one training after the other."""

import traceback

import drawn_deepspeed_engines as runs
from programs.run import folder, options, tell

from ctrainer.compat import deepspeed
from ctrainer.optim import _disk

_disk._LEAST = 1  # bytes, for a tiny model
results = {}
for number in options["numbers"]:
    case = runs.drawn(number)
    try:
        results[number] = runs.trained(case, deepspeed.initialize, f"{folder}/{number}")
    except Exception:
        results[number] = {"failed": f"{case}\n{traceback.format_exc()}"}
tell(results)
