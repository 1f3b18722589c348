"""Trainer with drawn options on 2 ranks, one training after the other."""

import sys
import traceback

from programs.run import folder, options, tell

sys.modules.update(dict.fromkeys(("pandas", "scipy", "sklearn", "torchao")))

import drawn_trainings as runs  # noqa: E402

from ctrainer.optim import _disk  # noqa: E402

_disk._LEAST = 1  # bytes, for a tiny model
results = {}
for number in options["numbers"]:
    case = runs.drawn(number)
    try:
        results[number] = runs.trained(case, f"{folder}/{number}")
    except Exception:
        results[number] = {"failed": f"{case}\n{traceback.format_exc()}"}
tell(results)
