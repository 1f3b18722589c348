"""Runs of fairseq's Trainer whose passes run out of memory at drawn places, on samples
as fairseq's data sets collate them."""

from __future__ import annotations

import random
from typing import Any

import fairseq_tiny as tiny
import torch

from ctrainer.fairseq import metrics
from ctrainer.runtime import parts


def samples(n: int, rows: int = 6) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for i in range(n):
        lengths = torch.randint(2, 8, (rows - i % 3,), generator=generator)
        words = torch.randint(1, tiny.WORDS, (len(lengths), 8), generator=generator)
        words[torch.arange(8) >= lengths[:, None]] = 0
        target = torch.where(words == 0, 0, 1 + words * 5 % (tiny.WORDS - 1))
        made.append(
            {
                "id": torch.arange(len(lengths)), "nsentences": len(lengths),
                "ntokens": int(lengths.sum()), "target": target,
                "net_input": {"src_tokens": words, "src_lengths": lengths},
            }
        )  # fmt: skip
    return made


class Criterion(tiny.Criterion):
    """Cross entropy of what is not padding; the sample size is the sample's ntokens, or
    its sentences. `mean`: by the words, with a sample size of 1."""

    def __init__(self, kind: str = "tokens") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, model: Any, sample: dict[str, Any]) -> Any:
        logits = model(sample["net_input"]["src_tokens"]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(
            logits, sample["target"].flatten(), ignore_index=0,
            reduction="mean" if self.kind == "mean" else "sum",
        )  # fmt: skip
        sizes = {"tokens": sample["ntokens"], "sentences": len(sample["target"])}
        size = sizes.get(self.kind, 1)
        output = {
            "loss": loss.item(), "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"], "sample_size": size,
        }  # fmt: skip
        return loss, size, output


class Failing(tiny.Model):
    """Fails where `fails(place, rows)` says so, in forward or in the middle of the
    backward pass."""

    def __init__(self, fails: Any = None, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.fails = fails or (lambda place, rows: False)
        self.passes = 0
        self.double()  # float32's rounding would hide small faults

    def check(self, place: str, rows: int) -> None:
        if self.training and self.fails(place, rows):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        hidden = self.drop(torch.tanh(self.embed(words)))
        self.check("forward", len(words))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.check("backward", len(words)))
        return self.out(hidden)


class Drawn:
    """Fails `most` times, where parts of 2 rows or more are drawn; parts grow again
    after each update."""

    def __init__(self, seed: int, rate: float, most: int) -> None:
        self.draw, self.rate, self.left = random.Random(seed), rate, most
        self.failed = 0
        parts.GROWTH_INTERVAL = 1

    def __call__(self, place: str, rows: int) -> bool:
        if rows < 2 or not self.left or self.draw.random() > self.rate:
            return False
        self.left -= 1
        self.failed += 1
        return True


def trained(updates: list[Any], model: Any, kind: str, **changes: Any) -> Any:
    """(trainer, losses, sample sizes, weights, meters) after training on updates."""
    trainer = tiny.trainer(model, criterion=Criterion(kind), **changes)
    trainer.reset_dummy_batch("DUMMY")
    outputs = [trainer.train_step(update) for update in updates]
    meters = metrics.get_smoothed_values("train")
    weights = [
        x for p in trainer.get_model().parameters() for x in p.flatten().tolist()
    ]
    return (
        trainer, [output and output["loss"] for output in outputs],
        [output and float(output["sample_size"]) for output in outputs], weights,
        {name: meters.get(name) or 0.0 for name in ("wpb", "bsz", "gnorm", "oom")},
    )  # fmt: skip
