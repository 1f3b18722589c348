"""A rank that is killed within a block."""

import os
import signal

from programs.run import folder, rank, tell
from rank_checkpoints import OF_BLOCKS, make, wait_for

import ctrainer


class Dying(ctrainer.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and rank == 1:
            wait_for(f"{args.output_dir}/checkpoint-4")
            os.kill(os.getpid(), signal.SIGKILL)


trainer = make(f"{folder}/killed", **OF_BLOCKS)
trainer.add_callback(Dying())
try:
    trainer.train()
except RuntimeError as problem:
    tell(str(problem))
