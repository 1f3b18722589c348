"""fairseq's Trainer on GPUs, of which rank 1 fails while rank 0's waits for it."""

import os
import time

import any_gpu
import fairseq_tiny as tiny
import torch
from fairseq_enqueued import trainer_of
from programs.run import folder, join_gloo, options, rank, tell, world

from ctrainer.adapters import torch_fairseq as tools

any_gpu.device()
join_gloo()
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
if rank == 1:
    os._exit(3)
began = time.monotonic()
try:
    trainer.train_step([batches[3]])
except (RuntimeError, ValueError) as raised:
    error = f"{type(raised).__name__}: {raised}"
seconds = time.monotonic() - began
saved = tools.load_file(f"{folder}/crash.pt")["model"]
same = all(torch.equal(saved[name], value) for name, value in weights.items())
tell([error, seconds, same])
os._exit(0)
