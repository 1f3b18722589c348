"""Runs of Trainer, ours and transformers', as ranks start them."""

from __future__ import annotations

import os
import time
from typing import Any

import tiny
import torch
from torch import nn
from torch.utils.data import IterableDataset

import ctrainer


class Stream(IterableDataset[Any]):
    """Rows one after the other, without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


LLAMA = {"learning_rate": 1e-2, "max_steps": 5, "per_device_train_batch_size": 2}
# A model, its data, and arguments
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "uneven": (tiny.Net, tiny.rows(37), {"num_train_epochs": 2,
                                         "gradient_accumulation_steps": 2}),
    "dropped": (tiny.Net, tiny.rows(37), {"max_steps": 7,
                                          "dataloader_drop_last": True}),
    "split": (tiny.Net, tiny.rows(37), {
        "max_steps": 11, "accelerator_config": {"split_batches": True}}),
    "dispatched": (tiny.Net, tiny.rows(37), {
        "max_steps": 6, "accelerator_config": {"dispatch_batches": True}}),
    "drawn": (tiny.Net, tiny.rows(37), {
        "num_train_epochs": 2, "accelerator_config": {"use_seedable_sampler": False}}),
    "stream": (tiny.Net, Stream(tiny.rows(22)), {"max_steps": 5}),
    "stream read by all": (tiny.Net, Stream(tiny.rows(22)), {
        "max_steps": 5, "accelerator_config": {"dispatch_batches": False}}),
    "by length": (tiny.llama, tiny.tokens(22), {
        **LLAMA, "train_sampling_strategy": "group_by_length"}),
    "tokens of all": (tiny.llama, tiny.tokens(20, padded=True),
                      {**LLAMA, "gradient_accumulation_steps": 2}),
    "tokens of each": (tiny.llama, tiny.tokens(20, padded=True),
                       {**LLAMA, "average_tokens_across_devices": False}),
}  # fmt: skip


def run(library: Any, folder: str, name: str) -> dict[str, Any]:
    """Batches, parameters and counters of one case, with that library's Trainer."""
    make, data, options = CASES[name]
    given = {"max_steps": -1, "per_device_train_batch_size": 4, **options}
    args = library.TrainingArguments(
        folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        logging_steps=1, ddp_timeout=60, data_seed=11, **given,
    )  # fmt: skip
    seen = []

    class Watching(library.Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
            first = next(iter(inputs.values()))
            seen.append(first.flatten(1)[:, 0].tolist())
            return super().training_step(model, inputs, *args, **kw)

    model: nn.Module = make()
    trainer = Watching(model, args, train_dataset=data)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return {
        "batches": seen,
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "norms": [log["grad_norm"] for log in logs],
        "losses": [log["loss"] for log in logs],
        "epoch": trainer.state.epoch,
        "steps": [trainer.state.global_step, trainer.state.max_steps],
    }


def compare(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for what in ("batches", "epoch", "steps"):
        assert ours[what] == theirs[what], (name, what, ours[what], theirs[what])
    for what in ("parameters", "norms"):
        values = [torch.as_tensor(r[what]) for r in (ours, theirs)]
        # Sums over ranks and of norms are taken in another order than gloo's and
        # torch's: a few ulp of float32 an update, on values below 10.
        torch.testing.assert_close(*values, rtol=2e-6, atol=2e-6, msg=f"{name}: {what}")


def trained(folder: str, rows: int, *callbacks: Any, base: Any = ctrainer.Trainer,
            resume: Any = None, **options: Any) -> Any:  # fmt: skip
    """Our trainer after a run of 6 updates over `tiny.rows` in their order."""
    args = ctrainer.TrainingArguments(
        folder,
        **{
            "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
            "max_steps": 6, "train_sampling_strategy": "sequential",
            "ddp_timeout": 60, "logging_strategy": "no", **options,
        },
    )  # fmt: skip
    trainer = base(
        tiny.Net(), args, train_dataset=tiny.rows(rows), callbacks=list(callbacks),
        eval_dataset=tiny.rows(8),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def parameters(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


class Wish(ctrainer.TrainerCallback):
    """Asks one rank's control to stop after an update."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == self.rank and state.global_step == self.step:
            control.should_training_stop = True


class Late(ctrainer.TrainerCallback):
    """Rank 0's last checkpoint is in its place a second after rank 1's run ends."""

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 0:
            written = f"{args.output_dir}/checkpoint-{state.max_steps}"
            os.rename(written, f"{args.output_dir}/tmp")
            time.sleep(1)
            os.rename(f"{args.output_dir}/tmp", written)


class Spoiling(ctrainer.Trainer):
    """Rank 1's third batch is not a number."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        if self.args.process_index == 1 and self.state.global_step == 2:
            inputs["x"] = inputs["x"] * float("nan")
        return super().compute_loss(model, inputs, *args, **kw)


class Holding(ctrainer.Trainer):
    """The model's no_sync() fails on all ranks."""

    def _wrap_model(self, *args: Any, **kwargs: Any) -> Any:
        def no_sync() -> Any:
            raise OSError("no_sync() of its own")

        model = super()._wrap_model(*args, **kwargs)
        model.no_sync = no_sync
        return model


class Failing(ctrainer.Trainer):
    """Rank 1 fails at its third batch."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        if self.args.process_index == 1 and self.state.global_step == 2:
            raise ZeroDivisionError("of its own")
        return super().compute_loss(model, inputs, *args, **kw)


class Exchanging(ctrainer.Trainer):
    """Notes after which micro-batches gradients are exchanged."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.seen: list[bool] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        self.seen.append(model.require_backward_grad_sync)
        return super().compute_loss(model, inputs, *args, **kw)


class Moding(ctrainer.Trainer):
    """Notes in which mode batches are trained on and evaluations logged; before the
    third update something puts the model into eval mode, as packages do to save it."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.seen: list[tuple[str, bool]] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        if torch.is_grad_enabled():
            self.seen.append(("step", self.model.training))
        return super().compute_loss(model, inputs, *args, **kw)

    def log(self, logs: Any, *args: Any, **kw: Any) -> None:
        if "eval_loss" in logs:
            self.seen.append(("log", self.model.training))
            self.model.eval()
        super().log(logs, *args, **kw)
