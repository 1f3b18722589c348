"""A collective of the GPUs never ends, in an update of DeepSpeed's engine whose norm is
read, or that would be saved, next."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import any_gpu
import emulated_torch
import torch
from programs.run import folder, options, rank, tell
from torch import nn

from ctrainer.comm import nccl
from ctrainer.compat import deepspeed

any_gpu.device()
nccl.run = SimpleNamespace(timeout_seconds=lambda: 2.0)  # the hosts wait longer
wheels = emulated_torch.FOLDER.parent / "wheels"
library = ctypes.CDLL(str(wheels / "nvidia/nccl/lib/libnccl.so.2"))
called = ctypes.c_int.in_dll(library, "fake_nccl_called")
stalls = ctypes.c_int.in_dll(library, "fake_nccl_stalls")

torch.manual_seed(1)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": options["stage"]},
    "gradient_clipping": 1.0,
}
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(model=model, config=config)
draws = torch.Generator().manual_seed(rank)
error, before, each = "", 0, 0
try:
    for update in range(5):
        if update == 4:
            stalls.value = called.value + max(each - options["from_last"] + 1, 1)
        before = called.value
        batch = torch.randn(2, 8, generator=draws).to(engine.device)
        engine.backward(engine(batch).square().mean())
        engine.step()
        each = called.value - before
    if options["asks"]:
        engine.get_global_grad_norm()
    else:
        engine.save_checkpoint(folder, "last")
except RuntimeError as raised:
    error = str(raised)
tell([error, [path.name for path in Path(folder).glob("last*/*")]])
