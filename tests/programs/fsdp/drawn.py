"""Trainer with drawn options on 2 ranks, one training after the other."""

import traceback

import drawn_trainings as runs
from programs.run import folder, options, tell

from ctrainer.optim import _disk

_disk._LEAST = 1  # bytes, for a tiny model
results = {}
for number in options["numbers"]:
    case = runs.drawn(number)
    try:
        results[number] = runs.trained(case, f"{folder}/{number}")
    except Exception:
        results[number] = {"failed": f"{case}\n{traceback.format_exc()}"}
tell(results)
