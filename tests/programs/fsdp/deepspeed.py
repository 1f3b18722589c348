"""Trainer with DeepSpeed configurations and sharded_ddp, on 2 ranks."""

import deepspeed_trainings as runs
from programs.run import folder, tell

from ctrainer.optim import _disk

_disk._LEAST = 1  # bytes, for a tiny model
results = {}
for name in [*runs.CASES, *runs.FAIRSCALE]:
    saves = {"save_strategy": "steps", "save_steps": 3} if "nvme" in name else {}
    made = runs.trainer(f"{folder}/{name}", name, **saves)
    made.train()
    results[name] = runs.told(made)
made = runs.in_groups(f"{folder}/groups", 1)
made.train()
results["groups of one"] = runs.told(made)
try:
    runs.in_groups(f"{folder}/three", 3).train()
except ValueError as error:
    results["groups of three"] = str(error)
for name in ("3 nvme fp32", "3 nvme shards fp32"):
    made = runs.trainer(f"{folder}/resumed", name)
    made.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-3")
    results[f"resumed {name}"] = runs.told(made)
config = runs.configuration(3, "nvme shards", "fp32")
config["zero_optimization"]["offload_param"]["max_in_cpu"] = runs.IN_MEMORY
made = runs.trainer(f"{folder}/in memory", "3 nvme shards fp32", deepspeed=config)
made.train()
results["in memory"] = runs.told(made)
config = runs.configuration(3, "nvme", "fp32")
config["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/none"
made = runs.trainer(f"{folder}/missing", "3 nvme fp32", deepspeed=config)
try:
    made.train()
except OSError as error:
    results["missing"] = str(error)
tell(results)
