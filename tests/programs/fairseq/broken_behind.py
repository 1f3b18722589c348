"""A collective of the GPUs never ends, in an update of fairseq's Trainer that would be
saved next."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import any_gpu
import emulated_torch
import fairseq_tiny as tiny
from fairseq_enqueued import trainer_of
from programs.run import folder, join_gloo, options, rank, tell, world

from ctrainer.comm import nccl

any_gpu.device()
join_gloo()
nccl.run = SimpleNamespace(timeout_seconds=lambda: 2.0)  # the hosts wait longer
wheels = emulated_torch.FOLDER.parent / "wheels"
library = ctypes.CDLL(str(wheels / "nvidia/nccl/lib/libnccl.so.2"))
called = ctypes.c_int.in_dll(library, "fake_nccl_called")
stalls = ctypes.c_int.in_dll(library, "fake_nccl_stalls")

trainer = trainer_of(
    options["enqueues"],
    distributed_training__distributed_world_size=world,
    distributed_training__ddp_backend=options["backend"],
    distributed_training__use_sharded_state=True,
)
error, before, each = "", 0, 0
try:
    for update, batch in enumerate(tiny.batches(10)[rank::world]):
        if update == 4:
            stalls.value = called.value + max(each - options["from_last"] + 1, 1)
        before = called.value
        trainer.train_step([batch])
        each = called.value - before
    if trainer.save_checkpoint(f"{folder}/checkpoint{rank}.pt", {}) is None:
        trainer.state_dict()
except RuntimeError as raised:
    error = str(raised)
tell([error, [path.name for path in Path(folder).glob("checkpoint*.pt")]])
