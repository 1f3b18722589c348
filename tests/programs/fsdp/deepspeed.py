"""Trainer with DeepSpeed configurations and sharded_ddp, on 2 ranks."""

import sys

from programs.run import folder, tell

sys.modules.update(dict.fromkeys(("pandas", "scipy", "sklearn", "torchao")))

import deepspeed_trainings as runs  # noqa: E402

results = {}
for name in [*runs.CASES, *runs.FAIRSCALE]:
    made = runs.trainer(f"{folder}/{name}", name)
    made.train()
    results[name] = runs.told(made)
made = runs.in_groups(f"{folder}/groups", 1)
made.train()
results["groups of one"] = runs.told(made)
try:
    runs.in_groups(f"{folder}/three", 3).train()
except ValueError as error:
    results["groups of three"] = str(error)
tell(results)
