"""A rank that is killed in an evaluation or within a save."""

import os
import signal

from programs.run import folder, options, rank, tell
from rank_checkpoints import make

import ctrainer

where = options["where"]


class Dying(ctrainer.Trainer):
    def prediction_step(self, *args, **kwargs):
        if rank == 1 and where == "evaluation":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prediction_step(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        if rank == 1 and where == "save":
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


trainer = make(folder, Dying)
try:
    trainer.evaluate() if where == "evaluation" else trainer.train()
except RuntimeError as problem:
    tell([str(problem), os.listdir(folder)])
