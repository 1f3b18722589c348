"""fairseq's Trainer on GPUs, of which rank 1 fails while rank 0's waits for it."""

import ctypes
import os
import time
from pathlib import Path

import any_gpu
import emulated_torch
import fairseq_tiny as tiny
import torch
from fairseq_enqueued import Criterion, trainer_of
from programs.run import folder, join_gloo, options, rank, tell, world

from ctrainer.adapters import torch_fairseq as tools

any_gpu.device()
join_gloo()
wheels = emulated_torch.FOLDER.parent / "wheels"
library = ctypes.CDLL(str(wheels / "nvidia/nccl/lib/libnccl.so.2"))
called = ctypes.c_int.in_dll(library, "fake_nccl_called")
stalls = ctypes.c_int.in_dll(library, "fake_nccl_stalls")
Criterion.stays = not options["enqueued"]  # torch's work would wait here
trainer = trainer_of(
    True,
    distributed_training__distributed_world_size=world,
    distributed_training__ddp_backend=options["backend"],
    distributed_training__use_sharded_state=True,
    checkpoint__save_dir=folder,
)
batches = tiny.batches(8)[rank::world]
for batch in batches[:3]:
    trainer.train_step([batch])
before = trainer.state_dict()["model"]
weights = {name: value.cpu().clone() for name, value in before.items()}
if options["enqueued"]:  # and in doubt, since its gradients never come
    stalls.value = called.value + 1
    trainer.train_step([batches[3]])
if rank == 1:
    os._exit(3)
began, error = time.monotonic(), ""
if options["enqueued"]:
    trainer._save_crash(RuntimeError("rank 1 died"), batches[:1], None, None)
    try:
        trainer.save_checkpoint(f"{folder}/checkpoint.pt", {})
    except RuntimeError as raised:
        error = str(raised)
    files = [path.name for path in Path(folder).glob("*.pt")]
    tell([error, time.monotonic() - began, files])
else:
    try:
        trainer.train_step([batches[3]])
    except RuntimeError as raised:
        error = str(raised)
    seconds = time.monotonic() - began
    saved = tools.load_file(f"{folder}/crash.pt")["model"]
    same = all(torch.equal(saved[name], value) for name, value in weights.items())
    tell([error, seconds, same])
os._exit(0)
