"""A rank on a GPU dies behind an update that it has enqueued: the others say so."""

import os
import time
from typing import Any

import any_gpu
from enqueued import run
from programs.run import folder, options, rank, tell

import ctrainer

any_gpu.device()


class Dies(ctrainer.TrainerCallback):
    begun = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        if state.global_step == 5 and rank == 1:
            os._exit(9)
        Dies.begun = time.monotonic()


try:
    run(folder, ctrainer.Trainer, set(), callbacks=[Dies()], **options)
except RuntimeError as error:
    tell([str(error), time.monotonic() - Dies.begun])
