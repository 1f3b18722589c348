"""Runs of small Trainers whose updates the host enqueues, or measures first."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import any_gpu
import torch
import transformers
from tiny import Net, arguments, rows

import ctrainer
from ctrainer import optim
from ctrainer.optim._wrapper import shape_of

UPDATES = 12


class Measured(ctrainer.Trainer):
    """A schedule of nobody's cannot take a step back: the host has to measure first."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = transformers.get_scheduler(
            self.args.lr_scheduler_type, optimizer or self.optimizer,
            self.args.warmup_steps, num_training_steps,
        )  # fmt: skip
        self.lr_scheduler.__class__ = Nobodys
        return self.lr_scheduler


class Nobodys(torch.optim.lr_scheduler.LambdaLR):
    """Might keep anything."""


class Notes(ctrainer.TrainerCallback):
    """How often the host had waited, and the enqueued engine, at the end of updates."""

    def __init__(self) -> None:
        self.waits: list[int] = []
        self.enqueued: list[bool] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        self.waits.append(any_gpu.waits())
        self.enqueued.append(self.trainer._enqueued_engine is not None)


def muon(groups: Any, lr: float) -> optim.Composite:
    """AdamW for what is no matrix, also of shards."""
    params = [p for group in groups for p in group["params"]]
    matrices = [p for p in params if len(shape_of(p)) == 2]
    return optim.Composite(
        [
            {"params": matrices, "optimizer": optim.Muon, "lr": lr},
            {"params": [p for p in params if len(shape_of(p)) != 2], "lr": lr},
        ]
    )


def data(bad: set[int]) -> list[dict[str, torch.Tensor]]:
    made = rows(5 * UPDATES)
    for i in bad:
        made[i]["labels"] = torch.tensor(float("nan" if i % 2 else "inf"))
    return made


def run(
    folder: Path, cls: type[ctrainer.Trainer], bad: set[int], **options: Any
) -> tuple[Any, Notes]:
    gc.collect()  # groups of earlier Trainers wait for the device when they are left
    resume, callbacks = options.pop("resume", None), options.pop("callbacks", [])
    model = options.pop("model", Net)
    optimizer = options.pop("optimizer", None)
    args = arguments(
        output_dir=str(folder), seed=5, learning_rate=1e-2,
        per_device_train_batch_size=5,
        **{"use_cpu": False, "max_steps": UPDATES, "save_strategy": "no", **options},
    )  # fmt: skip
    notes = Notes()
    trainer = cls(
        model().to(args.device), args, train_dataset=data(bad),
        callbacks=[notes, *callbacks], optimizer_cls_and_kwargs=optimizer,
    )  # fmt: skip
    trainer.remove_callback(ctrainer.PrinterCallback)
    notes.trainer = trainer
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        trainer.train(resume)
    return trainer, notes


def assert_same_runs(one: Any, other: Any) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)
    for trainer in (one, other):
        assert trainer._enqueued_engine is None
    saved = [t.optimizer.state_dict() for t in (one, other)]
    assert str(saved[0]["param_groups"]) == str(saved[1]["param_groups"])
    states = [s["state"] for s in saved]
    for key in states[0]:
        for name, value in states[0][key].items():
            found = torch.as_tensor(states[1][key][name]).cpu()
            torch.testing.assert_close(
                found, torch.as_tensor(value).cpu(), rtol=0, atol=0, equal_nan=True
            )
    epochs = [getattr(t.lr_scheduler, "last_epoch", None) for t in (one, other)]
    assert epochs[0] == epochs[1]  # torch's ChainedScheduler has none
    assert one.lr_scheduler.get_last_lr() == other.lr_scheduler.get_last_lr()
    logs = [
        [
            {k: str(v) for k, v in e.items() if "time" not in k and "second" not in k}
            for e in t.state.log_history
        ]
        for t in (one, other)
    ]
    assert logs[0] == logs[1]
    scalers = [t._loss_scaler and t._loss_scaler.state_dict() for t in (one, other)]
    assert scalers[0] == scalers[1]
    if one.weight_average is not None:
        a, b = (t.weight_average.state_dict() for t in (one, other))
        for name, value in a.pop("averages").items():
            found = b["averages"][name]
            torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)
        assert all(b[name] == value for name, value in a.items())
