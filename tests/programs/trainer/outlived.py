"""A training in which ranks are killed in the middle, and what it is compared with."""

import contextlib
import os
import signal
import time

import rank_checkpoints
import torch
from programs.run import folder, options, rank, tell
from torch import nn

import ctrainer
from ctrainer.comm import RankFailure, world

killed = options.get("killed", [])  # ranks, which die after step `at`
at, resume = options["at"], options.get("resume")
where = options.get("where", "forward")
times: list[float] = []


class Net(rank_checkpoints.Net):
    """Without dropout: other ranks have other random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers[1] = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        self.layers[1].register_full_backward_hook(
            lambda *_: die() if dies("middle") else None
        )
        self.steps = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None):
        if dies("forward"):
            die()
        if dies("signal"):
            die(signal.SIGTERM)
        if where == "signal" and 8 > trainer.state.global_step >= at:
            time.sleep(3.0)
        return super().forward(x, labels)


def fails(place: str) -> bool:
    there = trainer.state.global_step == at and world().world_size == options["of"]
    return place == where and there


def dies(place: str) -> bool:
    return fails(place) and rank in killed


def die(number: int = signal.SIGKILL) -> None:
    """By a signal, or by an error of the rank's own; not before what is being saved
    is there, which the others may resume from."""
    state, args = trainer.state, trainer.args
    if saved := state.global_step // args.save_steps * args.save_steps:
        rank_checkpoints.wait_for(f"{args.output_dir}/checkpoint-{saved}")
    with open(f"{folder}/killed{rank}", "w") as file:
        file.write(str(time.time()))
    if options.get("raises"):
        raise ValueError("of this rank alone")
    if options.get("agents"):  # torchrun's, which starts the ranks of a machine
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), number)


class Trainer(ctrainer.Trainer):
    late = rank == options.get("late")

    def _together(self, doing, function):
        found = super()._together(doing, function)
        if doing == "finding its folder" and self.late:
            self.late = False  # the others train already
            raise RankFailure("it has not got what they have")
        return found

    def create_optimizer(self, *args, **kwargs):
        if rank == options.get("resuming") and world().world_size < options["of"]:
            die()  # while the others resume
        return super().create_optimizer(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if dies("backward"):
            die()
        return loss


class Watch(ctrainer.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if dies("agreed"):
            die()
        if fails("agreed") and rank == 1:  # it has not got what others have
            time.sleep(0.5)
            raise RankFailure("rank 3 died")

    def on_optimizer_step(self, args, state, control, **kwargs):
        if dies("update") or dies("updated"):
            die()
        if fails("updated"):  # on all ranks, before the update is counted
            world().barrier()

    def on_log(self, args, state, control, **kwargs):
        if dies("log"):
            die()

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size < options["of"]:
            times.append(time.time())
        if options.get("stops") and state.global_step == at:
            control.should_training_stop = control.should_save = True


class Arguments(ctrainer.TrainingArguments):
    def join_torch(self):
        if rank == options.get("joining") and self.world_size < options["of"]:
            die()
        super().join_torch()


rank_checkpoints.Net = Net
rank_checkpoints.Arguments = Arguments
trainer = rank_checkpoints.make(
    options.get("output", folder),
    Trainer,
    max_steps=8,
    logging_steps=1,
    **options["arguments"],
)
trainer.add_callback(Watch())
if trainer._sharding is not None:
    trainer.evaluate()  # which shards the model
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
shards = trainer._shard_group is not None
with trainer.model.summon_full_params() if shards else contextlib.nullcontext():
    weights = rank_checkpoints.weights(trainer)
tell(
    {
        "losses": {entry["step"]: entry["loss"] for entry in history},
        "weights": weights,
        "evaluated": trainer.evaluate()["eval_loss"],
        "place": [trainer.args.process_index, trainer.args.world_size],
        "torch": [dist.get_rank(), dist.get_world_size()],
        "seconds": times[0] - max(died) if died else None,
        "resumed": trainer.state.resumed_from,
    }
)
