"""fairseq's Trainers of ranks on a GPU each: updates that are enqueued, and those that
are measured first."""

from unittest import mock

import any_gpu
import fairseq_tiny as tiny
import numpy as np
import torch
from fairseq_enqueued import Criterion, run, trainer_of
from programs.run import folder, join_gloo, rank, tell, world
from torch import nn

from ctrainer.fairseq import metrics

any_gpu.device()
join_gloo()

TWO = {"distributed_training__distributed_world_size": world}
LEGACY = {**TWO, "distributed_training__ddp_backend": "legacy_ddp"}
CASES = {
    "plain": TWO,
    "clipped": {**TWO, "optimization__clip_norm": 0.05},
    "accumulated": {**TWO, "optimization__update_freq": [2]},
    "legacy": {**LEGACY, "optimization__clip_norm": 0.05},
    "bf16": {**TWO, "common__bf16": True, "optimization__clip_norm": 0.05},
    "adafactor": {
        **LEGACY,
        "optimizer___name": "adafactor",
        "optimizer__relative_step": False,
    },
    "without a batch": {**TWO, "without": {1: [2, 4], 0: [3]}},
    "others stay": TWO,
    "sharded state": {**TWO, "distributed_training__zero_sharding": "os"},
    "overridden": TWO,
}


class Overridden(tiny.Trainer):
    def clip_grad_norm(self, clip_norm):
        return super().clip_grad_norm(clip_norm)


class Drifted(nn.Module):
    """As after a fault of the exchange."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)

    def set_num_updates(self, number):
        self.inner.module.set_num_updates(number)

    def all_reduce_grads(self):
        self.inner.all_reduce_grads()
        with torch.no_grad():
            for p in self.parameters():
                p.grad *= 2.0


def is_close(seen, host):
    """What the steps returned, and the weights."""
    losses = ([output["loss"] for output in each[0]] for each in (seen, host))
    return np.allclose(*losses, rtol=0, atol=1.1e-3) and all(
        np.allclose(a, b, rtol=0, atol=1e-6)
        for a, b in zip(seen[-3:], host[-3:], strict=True)
    )


found = {"runs": {}}
for name, changes in CASES.items():
    looks = {3} if name == "clipped" else set()
    Criterion.stays = name != "others stay" or rank == 0
    cls = Overridden if name == "overridden" and rank == 1 else tiny.Trainer
    with mock.patch.object(tiny, "Trainer", cls):
        _, enqueued, waits = run(True, looks, rank, world, **changes)
    _, measured, others = run(False, looks, rank, world, **changes)
    same = str(enqueued) == str(measured)
    if not looks:
        _, host, _ = run(False, looks, rank, world, **changes, common__cpu=True)
        same = same and is_close(enqueued, host)
    found["runs"][name] = [same, waits, others]

found["updates"] = []
for name, factor in (("not finite", "nan"), ("drift", "1"), ("drift, read", "1")):
    trainer = trainer_of(True, checkpoint__save_dir=f"{folder}/{name}", **LEGACY)
    batches = tiny.batches(8)[rank::world]
    for batch in batches[:2]:
        trainer.train_step([batch])
    try:
        if name != "not finite" and rank == 1:
            trainer._wrapped_model = Drifted(trainer.model)
        trainer.train_step([{**batches[2], "factor": torch.tensor(float(factor))}])
        if name == "drift, read" and rank == 0:  # which is no collective
            metrics.get_smoothed_values("train")
        trainer.train_step([batches[3]])
    except FloatingPointError as error:
        found[name] = str(error)
    found["updates"].append(trainer.get_num_updates())
tell(found)
