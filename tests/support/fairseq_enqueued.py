"""Runs of fairseq's Trainer whose updates the host enqueues, or measures first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import any_gpu
import fairseq_tiny as tiny
import torch

from ctrainer.fairseq import metrics

UPDATES = 6


class Criterion(tiny.Criterion):
    """Logs the loss where it is, as fairseq's criterions do."""

    stays = True

    def forward(self, model: Any, sample: dict[str, Any]) -> Any:
        logits = model(sample["words"]).float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(
            logits, sample["target"].flatten(), reduction="sum"
        )
        loss = loss * sample.get("factor", 1.0)
        size = sample["target"].numel()
        numbers = {"ntokens": size, "nsentences": len(logits), "sample_size": size}
        logged = loss.detach().clone() if self.stays else loss.item()
        return loss, size, {"loss": logged, **numbers}


def trainer_of(enqueues: bool, **changes: Any) -> Any:
    changes = {"common__cpu": False, **changes}
    trainer = tiny.trainer(criterion=Criterion(), **changes)
    if not enqueues:
        trainer._enqueues_updates = lambda: False
        trainer._read_config()
    return trainer


def values_of(name: str) -> dict[str, str]:
    found = metrics.get_smoothed_values(name)
    return {
        k: str(v) for k, v in found.items() if k not in ("ups", "wps", "train_wall")
    }


def run(
    enqueues: bool,
    looks: set[int],
    rank: int = 0,
    world: int = 1,
    without: Mapping[int, Iterable[int]] = MappingProxyType({}),
    **changes: Any,
) -> tuple[Any, list[Any], list[int]]:
    """A trainer, what there is to see of its updates, and the waits of each. After
    the updates in `looks` somebody reads the log, as at log_interval. without: the
    updates for which a rank has no batch."""
    trainer = trainer_of(enqueues, **changes)
    freq = changes.get("optimization__update_freq", [1])[0]
    trainer.reset_dummy_batch("DUMMY")
    mine: list[Any] = tiny.batches(UPDATES * freq * world)[rank::world]
    for update in without.get(rank, ()):
        mine[update] = None
    seen: list[Any] = []
    outputs: list[Any] = []
    waits = []
    with metrics.aggregate("train_inner"):
        for i, samples in enumerate(tiny.groups(mine, freq)):
            before = any_gpu.waits()
            outputs.append(trainer.train_step(samples))
            waits.append(any_gpu.waits() - before)
            if i in looks:
                seen.append(values_of("train_inner"))
                metrics.reset_meters("train_inner")
                seen.append(outputs[-1])
    seen += [
        [dict(output) for output in outputs],
        values_of("train"),
        trainer.get_num_updates(),
    ]
    if not hasattr(trainer.cfg.distributed_training, "zero_sharding"):
        seen += state_of(trainer)
    seen += [p.detach().cpu().tolist() for p in trainer.model.parameters()]
    return trainer, seen, waits


def state_of(trainer: Any) -> list[Any]:
    """What of its state no clock and no device decides."""
    state = trainer.state_dict()
    seen = [str(state.pop(k)) for k in ("optimizer_history", "last_optimizer_state")]
    for meters in state["extra_state"]["metrics"].values():
        for _, key, _, values in meters:
            assert {type(v) for v in values.values()} <= {
                int, float, torch.Tensor, type(None),
            }  # fmt: skip
            if key in ("gnorm", "clip"):
                seen.append(values)
    return seen
