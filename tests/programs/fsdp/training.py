"""HF's Trainer with fsdp on 2 ranks."""

import sharded_trainings as runs
from programs.run import folder, rank, tell

from ctrainer.comm import machines, world

assert world(60).world_size == 2
machines._this_machine = lambda: f"machine {rank}"  # as for hybrid sharding
results = {name: runs.both(folder, name) for name in runs.CASES}
results["plain"] = runs.plain(folder)
results["failed"] = runs.failed(folder)
results["loaded"] = runs.loaded(folder)
results["saved"] = runs.saved(folder)
results["factored"] = runs.of_whole_parameters(folder)
results["quantized"] = runs.of_quantized_state(folder)
results["of 8 bits"] = runs.of_quantized_base(folder)
results["blocks"] = runs.cut_on_blocks(folder)
results["other"] = runs.of_other_units(folder)
results["older"] = runs.older(folder)
results["coded"] = runs.coded(folder)
results["adapted"] = runs.adapted(folder)
results["spoiled"] = runs.spoiled(folder)
results["saved by others"] = runs.saved_by_others(folder)
tell(results)
