"""A task, a criterion and a model as a user of fairseq writes them, and a config."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ctrainer.fairseq import metrics
from ctrainer.fairseq.trainer import Trainer

torch.set_num_threads(1)
WORDS = 13


class Model(nn.Module):
    """Guesses a word from the one before it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(8, WORDS)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2
        self.updates: list[int] = []

    def set_num_updates(self, number: int) -> None:
        self.updates.append(number)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.tanh(self.embed(words))))


class Criterion(nn.Module):
    """Cross entropy, summed; the sample size is the number of words."""

    def forward(self, model: nn.Module, sample: dict[str, Any]) -> Any:
        logits = model(sample["words"]).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(
            logits, sample["target"].flatten(), reduction="sum"
        )
        if "factor" in sample:
            loss = loss * sample["factor"]
        size = sample["target"].numel()
        output = {
            "loss": loss.item(),
            "ntokens": size,
            "nsentences": len(sample["target"]),
            "sample_size": size,
        }
        return loss, size, output

    @classmethod
    def reduce_metrics(cls, outputs: list[dict[str, Any]]) -> None:
        loss = sum(o["loss"] for o in outputs)
        size = sum(o["sample_size"] for o in outputs)
        metrics.log_scalar("loss", loss / size / math.log(2), size, round=3)
        metrics.log_derived("ppl", lambda meters: 2 ** meters["loss"].avg)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


class Task:
    """What fairseq's FairseqTask does in a step."""

    uses_ema = False

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def train_step(
        self,
        sample: dict[str, Any],
        model: nn.Module,
        criterion: nn.Module,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
        **extra: Any,
    ) -> Any:
        self.seen.append(
            {"update_num": update_num, "ignore_grad": ignore_grad, **extra}
        )
        model.train()
        model.set_num_updates(update_num)  # type: ignore[operator]
        loss, sample_size, output = criterion(model, sample)
        if ignore_grad:
            loss *= 0
        optimizer.backward(loss)
        return loss, sample_size, output

    def valid_step(self, sample: Any, model: Any, criterion: Any, **extra: Any) -> Any:
        model.eval()
        with torch.no_grad():
            return criterion(model, sample)

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        optimizer.step()

    @classmethod
    def logging_outputs_can_be_summed(cls, criterion: Any) -> bool:
        return bool(criterion.__class__.logging_outputs_can_be_summed())

    def reduce_metrics(self, outputs: list[dict[str, Any]], criterion: Any) -> None:
        metrics.log_scalar("wpb", sum(o["ntokens"] for o in outputs), 1, 180, 1)
        metrics.log_speed("wps", sum(o["ntokens"] for o in outputs), 90, 1)
        metrics.log_scalar("bsz", sum(o["nsentences"] for o in outputs), 1, 190, 1)
        criterion.__class__.reduce_metrics(outputs)

    def begin_epoch(self, epoch: int, model: Any) -> None: ...

    def begin_valid_epoch(self, epoch: int, model: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"words": WORDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"words": WORDS}

    def max_positions(self) -> int:
        return 64


def config(**changes: Any) -> Any:
    """fairseq's config; changes are group__name=value."""
    groups: dict[str, dict[str, Any]] = {
        "common": {"cpu": True, "seed": 7, "fp16": False, "bf16": False, "amp": False},
        "optimization": {"update_freq": [1], "clip_norm": 0.0, "lr": [0.02]},
        "optimizer": {"_name": "adam", "lr": [0.02], "adam_betas": "(0.9, 0.98)"},
        "lr_scheduler": {"_name": "inverse_sqrt", "lr": [0.02], "warmup_updates": 4},
        "checkpoint": {"save_dir": "checkpoints", "no_save_optimizer_state": False},
        "distributed_training": {"distributed_world_size": 1},
        "dataset": {"max_tokens": None, "batch_size": 2},
        "ema": {"store_ema": False},
        "model": {"_name": "tiny"},
        "bmuf": {"global_sync_iter": 2, "block_momentum": 0.0, "warmup_iterations": 0},
    }
    for key, value in changes.items():
        group, name = key.split("__")
        groups[group][name] = value
    made = {name: SimpleNamespace(**values) for name, values in groups.items()}
    return SimpleNamespace(**made)


def trainer(
    model: Model | None = None, task: Any = None, criterion: Any = None, **changes: Any
) -> Trainer:
    """A trainer whose metrics begin empty."""
    metrics.reset()
    options = {"original_dummies": changes.pop("original_dummies", False)}
    return Trainer(
        config(**changes), task or Task(), model or Model(), criterion or Criterion(),
        **options,
    )  # fmt: skip


def batches(n: int, rows: int = 2, columns: int = 5) -> list[dict[str, torch.Tensor]]:
    """Batches of different sizes."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for i in range(n):
        shape = (rows, columns + i % 3)
        words = torch.randint(0, WORDS, shape, generator=generator)
        made.append({"words": words, "target": (words * 5 + 3) % WORDS})
    return made


def groups(samples: list[Any], update_freq: int) -> list[list[Any]]:
    ends = range(0, len(samples), update_freq)
    return [samples[i : i + update_freq] for i in ends]
