"""HF's Trainer with fsdp on 2 ranks."""

import sys

from programs.run import folder, rank, tell

from ctrainer.comm import machines, world

# transformers imports these where they are, and no run here needs them
sys.modules.update(dict.fromkeys(("pandas", "scipy", "sklearn", "torchao")))

import sharded_trainings as runs  # noqa: E402

assert world(60).world_size == 2
machines._this_machine = lambda: f"machine {rank}"  # as for hybrid sharding
results = {name: runs.both(folder, name) for name in runs.CASES}
results["plain"] = runs.plain(folder)
results["saved"] = runs.saved(folder)
results["factored"] = runs.of_whole_parameters(folder)
results["quantized"] = runs.of_quantized_state(folder)
results["blocks"] = runs.cut_on_blocks(folder)
results["other"] = runs.of_other_units(folder)
results["older"] = runs.older(folder)
results["coded"] = runs.coded(folder)
results["adapted"] = runs.adapted(folder)
results["spoiled"] = runs.spoiled(folder)
results["saved by others"] = runs.saved_by_others(folder)
tell(results)
