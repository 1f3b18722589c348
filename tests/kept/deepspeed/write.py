"""Lets DeepSpeed train, and keeps what it says and the checkpoints it writes.

Not run by the tests: `python write.py FOLDER` on two ranks, and of skipping.json on one
rank, too, in an environment with
DeepSpeed 0.19.8 and tests/support in PYTHONPATH, DS_ACCELERATOR=cpu. The folders
universal are of deepspeed.checkpoint.ds_to_universal with --inject_missing_state.
"""

import json
import os
import sys

import deepspeed
import deepspeed_engines as runs
from deepspeed.accelerator import get_accelerator

# Torch computes in float16 on CPUs, too.
type(get_accelerator()).is_fp16_supported = lambda self: True  # type: ignore
# Without a compiler: gloo does what this operator would.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

found = {name: runs.skipping(deepspeed.initialize, name) for name in runs.SKIPPING}
if int(os.environ["RANK"]) == 0:
    path = os.path.join(sys.argv[1], "skipping.json")
    kept = json.load(open(path)) if os.path.exists(path) else {}
    kept[os.environ["WORLD_SIZE"]] = found
    with open(path, "w") as file:
        json.dump(kept, file)
if int(os.environ["WORLD_SIZE"]) == 1:
    sys.exit()

found = {}
for name, (stage, dtype, in_groups) in runs.CASES.items():
    folder = os.path.join(sys.argv[1], name.replace(" ", "_"))
    model = runs.Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=runs.parameters(model, in_groups),
        config=runs.configuration(stage, dtype),
    )
    log = runs.train(engine, dtype, 0, runs.SAVED_AT)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    log += runs.train(engine, dtype, runs.SAVED_AT, runs.MICRO_STEPS)
    found[name] = log
    if engine.global_rank == 0:
        with open(os.path.join(sys.argv[1], "trainings.json"), "w") as file:
            json.dump(found, file, indent=1)
    engine.destroy()
