"""Trainers of ranks on a GPU each: updates that are enqueued, those that are measured
first, and those of the same ranks on the host."""

from typing import Any

import any_gpu
import torch
from enqueued import Measured, assert_same_runs, muon, run
from programs.run import folder, rank, tell
from tiny import Net
from torch import nn

import ctrainer
from ctrainer import optim
from ctrainer.comm import world

any_gpu.device()


class Unused(Net):
    """A layer of it takes part in no pass."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


BAD = {3, 17, 33, 46}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.05, "logging_steps": 3},
    "kept": {"nonfinite_policy": "keep"},
    "accumulated": {"gradient_accumulation_steps": 2},
    "averaged": {"ema_decay": 0.5, "ema_start_update": 3},
    "fp16": {"fp16": True, "loss_scaler": {"init_scale": 2.0**20}},
    "sharded": {"fsdp": "full_shard", "max_grad_norm": 0.05},
    "sharded, fp16": {"fsdp": "full_shard", "fp16": True},
    "unused": {"optim": "sgd", "model": Unused},
    "heard": {},
    "adafactor": {"optim": "adafactor", "max_grad_norm": 0.05},
    "adafactor, sharded": {"optim": "adafactor", "fsdp": "full_shard"},
    "muon, sharded": {"optimizer": (muon, {"lr": 0.02}), "fsdp": "full_shard"},
    "lamb, sharded": {"optimizer": (optim.LAMB, {"lr": 0.02}), "fsdp": "full_shard"},
    "schedule-free, fp16": {"optim": "schedule_free_radam", "fp16": True},
    "blocks": {"use_bmuf": True, "global_sync_iter": 3, "warmup_iterations": 0},
    "blocks, adam's moments": {
        "use_bmuf": True,
        "global_sync_iter": 2,
        "warmup_iterations": 2,
        "average_sync": True,
        "fp16": True,
    },
    "blocks after a warm-up": {
        "use_bmuf": True,
        "global_sync_iter": 2,
        "warmup_iterations": 4,
        "ema_decay": 0.5,
    },
    "diloco": {"use_diloco": True, "global_sync_iter": 4, "overlap_steps": 1},
    "alone": {"ddp_find_unused_parameters": False},
}


class Hears(ctrainer.TrainerCallback):
    """It has to see the gradients, on one rank."""

    def on_pre_optimizer_step(self, *args: Any, **k: Any) -> None:
        assert all(p.grad is not None for p in k["model"].parameters())


found: dict[str, Any] = {}
for name, options in CASES.items():
    heard = [Hears()] if name == "heard" and rank == 1 else []
    bad = set() if name == "plain" else BAD
    runs = []
    for way, cls, cpu in (
        ("a", ctrainer.Trainer, False),
        ("b", Measured, False),
        ("c", Measured, True),
    ):
        made, notes = run(
            f"{folder}/{name}{way}", cls, bad, use_cpu=cpu, callbacks=list(heard),
            **options,
        )  # fmt: skip
        runs.append(made)
        if way == "a":
            found[name] = any(notes.enqueued)
    assert_same_runs(runs[0], runs[1])
    # The host adds up a norm in another order.
    for a, b in zip(
        runs[0].model.parameters(), runs[2].model.parameters(), strict=True
    ):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-7, equal_nan=True)
waits: dict[str, list[int]] = {
    "plain": [], "sharded": [], "blocks": [], "adafactor, sharded": [],
    "muon, sharded": [],
}  # fmt: skip
for name, counted in waits.items():
    for cls in (ctrainer.Trainer, Measured):
        _, notes = run(
            f"{folder}/waits", cls, set(), max_steps=24, logging_strategy="no",
            **{**CASES[name], "max_grad_norm": 1.0},
        )  # fmt: skip
        counted.append(notes.waits[-1] - notes.waits[3])
tell({"rank": rank, "gpu": world().gpu, "enqueued": found, "waits": waits})
