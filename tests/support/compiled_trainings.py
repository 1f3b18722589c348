"""Trainings with torch_compile, ours and transformers': rows of uneven lengths, a last
short batch, evaluations in between; and what torch.compile has counted."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# inductor takes the name of a compiler, and no "ccache g++".
if "CXX" in os.environ:
    os.environ["CXX"] = os.environ["CXX"].split()[-1]

import torch
import transformers
from head_trainings import WORDS, logged, model
from torch._dynamo import reset, utils

import ctrainer


@dataclass
class Compiled:
    """A training: (loss, gradient norm) by update, losses of evaluations, and graph
    breaks, graphs and recompilations of torch.compile."""

    trainer: Any
    logged: torch.Tensor
    evaluated: torch.Tensor
    breaks: int
    graphs: int
    recompiled: list[str]


def rows(n: int, longest: int = 16) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    lengths = draw(4, longest + 1, n).tolist()
    return [{"input_ids": draw(1, WORDS, length).tolist()} for length in lengths]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows filled up to the longest of the batch, as all collators of text do."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["input_ids"]) for row in batch], batch_first=True
    )
    labels = torch.where(ids > 0, ids, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids > 0).long()}


def trainer_of(
    folder: Path, made: Any, theirs: bool = False, data: Any = None, **options: Any
) -> Any:
    """A silent trainer; a last batch of an epoch has 3 rows, the others 4."""
    package: Any = transformers if theirs else ctrainer
    args = package.TrainingArguments(
        str(folder), **{
            "report_to": [], "disable_tqdm": True, "save_strategy": "no",
            "max_steps": 20, "logging_steps": 1, "eval_strategy": "steps",
            "eval_steps": 8, "use_cpu": True, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2, "learning_rate": 0.01,
            "max_grad_norm": 0.5, "optim": "adamw_torch", **options,
        },
    )  # fmt: skip
    data = rows(39) if data is None else data
    trainer = package.Trainer(
        made, args, train_dataset=data, eval_dataset=data[:9],
        data_collator=padded if isinstance(data[0]["input_ids"], list)
        and not options.get("pack_sequences") else None,
    )  # fmt: skip
    for printer in (transformers.PrinterCallback, ctrainer.PrinterCallback):
        trainer.remove_callback(printer)
    return trainer


def trained(
    folder: Path, kind: Any, theirs: bool = False, resume: Any = None, **options: Any
) -> Compiled:
    """Train a model, or one of the kind that head_trainings has, with nothing compiled
    before."""
    made = model(kind) if isinstance(kind, str) else kind
    trainer = trainer_of(folder, made, theirs, **options)
    reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume)
    reasons = [metrics.recompile_reason for metrics in utils.get_compilation_metrics()]
    history = trainer.state.log_history
    return Compiled(
        trainer,
        torch.tensor(logged(trainer)),
        torch.tensor([entry["eval_loss"] for entry in history if "eval_loss" in entry]),
        sum(utils.counters["graph_break"].values()),
        utils.counters["stats"]["unique_graphs"],
        [reason for reason in reasons if reason],
    )
