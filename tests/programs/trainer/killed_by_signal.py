"""A run that is sent a signal in its third step: a folder, and the signal."""

import os
import signal
import sys

from tiny import Net, make, rows

import ctrainer


class Kills(ctrainer.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))


trainer = make(
    ctrainer.Trainer,
    Net(),
    rows(),
    max_steps=10,
    save_strategy="steps",
    save_steps=100,
    output_dir=sys.argv[1],
    callbacks=[Kills()],
)
try:
    trainer.train()
finally:
    print("steps", trainer.state.global_step, flush=True)
