"""fairseq's Trainer, of which rank 1 is late."""

import time

import fairseq_tiny as tiny
from programs.run import join_gloo, rank, tell

join_gloo()
trainer = tiny.trainer(
    distributed_training__distributed_world_size=2,
    distributed_training__heartbeat_timeout=2,
)
batches = tiny.batches(4)[rank::2]
trainer.train_step([batches[0]])
if rank == 1:
    time.sleep(6)
began, error = time.monotonic(), ""
try:
    trainer.train_step([batches[1]])
except RuntimeError as raised:
    error = str(raised)
tell([error, time.monotonic() - began])
