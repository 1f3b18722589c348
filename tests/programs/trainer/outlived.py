"""A training in which ranks are killed in the middle, and what it is compared with."""

import os
import signal
import time

import rank_checkpoints
import torch
from programs.run import folder, options, rank, tell
from torch import nn

import ctrainer
from ctrainer.comm import world

killed = options.get("killed", [])  # ranks, which die after step `at`
at, resume = options["at"], options.get("resume")
where = options.get("where", "forward")
times: list[float] = []


class Net(rank_checkpoints.Net):
    """Without dropout: other ranks have other random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Identity()
        self.steps = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None):
        if dies("forward"):
            die()
        return super().forward(x, labels)


def dies(place: str) -> bool:
    there = trainer.state.global_step == at and world().world_size == options["of"]
    return place == where and rank in killed and there


def die() -> None:
    """By SIGKILL, or by an error of the rank's own."""
    with open(f"{folder}/killed{rank}", "w") as file:
        file.write(str(time.time()))
    if options.get("raises"):
        raise ValueError("of this rank alone")
    if options.get("agents"):  # torchrun's, which starts the ranks of a machine
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Trainer(ctrainer.Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if dies("backward"):
            die()
        return loss


class Watch(ctrainer.TrainerCallback):
    def on_optimizer_step(self, args, state, control, **kwargs):
        if dies("update"):
            die()

    def on_log(self, args, state, control, **kwargs):
        if dies("log"):
            die()

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size < options["of"]:
            times.append(time.time())
        if options.get("stops") and state.global_step == at:
            control.should_training_stop = control.should_save = True


rank_checkpoints.Net = Net
trainer = rank_checkpoints.make(
    options.get("output", folder),
    Trainer,
    max_steps=8,
    logging_steps=1,
    **options["arguments"],
)
trainer.add_callback(Watch())
try:
    trainer.train(resume_from_checkpoint=resume)
except ValueError:  # its process stays a while, and nobody waits for it
    end = time.monotonic() + 60
    while not os.path.exists(f"{folder}/told0.json") and time.monotonic() < end:
        time.sleep(0.1)
    raise
died = [
    float(open(f"{folder}/killed{number}").read())
    for number in killed
    if os.path.exists(f"{folder}/killed{number}")
]
history = [entry for entry in rank_checkpoints.history(trainer) if "loss" in entry]
dist = torch.distributed
tell(
    {
        "losses": {entry["step"]: entry["loss"] for entry in history},
        "weights": "" if trainer._shard_group else rank_checkpoints.weights(trainer),
        "place": [trainer.args.process_index, trainer.args.world_size],
        "torch": [dist.get_rank(), dist.get_world_size()],
        "seconds": times[0] - max(died) if died else None,
        "resumed": trainer.state.resumed_from,
    }
)
