"""DeepSpeed's engines of ranks on a GPU each: updates that are enqueued, and those that
are measured first."""

import any_gpu
from deepspeed_enqueued import run
from programs.run import rank, tell, world

any_gpu.device()
CASES = {
    f"{stage} {dtype}": {"stage": stage, "dtype": dtype}
    for stage in range(4)
    for dtype in ("fp32", "bf16", "fp16")
}
CASES["one rank's schedule is nobody's"] = {"stage": 2, "dtype": "fp32"}
if rank == 1:
    CASES["one rank's schedule is nobody's"]["schedule"] = "of a class of nobody's"
found = {}
for name, changes in CASES.items():
    options = {
        "schedule": "WarmupLR", "clip": 0.5, "passes": 1, "optimizer": "AdamW",
        **changes,
    }  # fmt: skip
    bad = {2 + rank}  # one rank's loss alone
    enqueued, waits = run(True, {}, bad, rank, world, **options)
    measured, _ = run(False, {}, bad, rank, world, **options)
    found[name] = [str(enqueued) == str(measured), waits]
tell(found)
