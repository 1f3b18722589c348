"""Runs of HF's Trainer in which ranks have unequal data."""

from __future__ import annotations

from typing import Any

import tiny
from torch.utils.data import DataLoader, IterableDataset

import ctrainer


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(tiny.rows(self.n))


class Skipping(ctrainer.Trainer):
    """Leaves a micro-batch out before one update, on one rank."""

    skips = False

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, count = super().get_batch_samples(*args, **kwargs)
        if self.skips and self.state.global_step == 2:
            batches = batches[1:]
        return batches, count


class OwnLoader(ctrainer.Trainer):
    """Deals its data out itself."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, 4, collate_fn=self.data_collator)


def run(
    folder: str,
    make: type[ctrainer.Trainer],
    data: Any,
    skips: bool = False,
    **more: Any,
) -> Any:
    """The steps that were made, or what was raised."""
    args = ctrainer.TrainingArguments(
        folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        **{"num_train_epochs": 1, "per_device_train_batch_size": 4, "ddp_timeout": 30,
           "gradient_accumulation_steps": 2, **more},
    )  # fmt: skip
    trainer = make(tiny.Net(), args, train_dataset=data)
    if skips:
        trainer.skips = True  # type: ignore[attr-defined]
    try:
        trainer.train()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return trainer.state.global_step
