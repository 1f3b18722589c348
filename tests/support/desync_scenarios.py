"""Programs of sharded modules in which one rank does something else than the others."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rank_threads import seeded
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

WIDTH, EXPERTS = 12, 3


class Mixture(nn.Module):
    """Units of one shape, of which a forward uses some, in an order of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.experts = nn.ModuleList(
                nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)
            )
            self.head = nn.Linear(WIDTH, WIDTH)

    def shard(self, group: _C.Communicator, options: dict[str, Any]) -> Any:
        for number, expert in enumerate(self.experts):
            self.experts[number] = FSDP(expert, process_group=group, **options)
        return FSDP(self, process_group=group, **options)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = x + self.experts[number](x)
        return self.head(x)


@dataclass
class Rank:
    model: Any
    group: _C.Communicator
    order: list[int]  # of the units that all use
    is_wrong: bool  # this rank does something else, from some step on

    def step(self, order: list[int] | None = None, sync: bool = True) -> None:
        with contextlib.nullcontext() if sync else self.model.no_sync():
            used = self.order if order is None else order
            self.model(torch.ones(2, WIDTH), used).square().mean().backward()


def same(rank: Rank) -> None:
    rank.step()


def other_unit(rank: Rank) -> None:
    """Each token of the wrong rank goes to another expert."""
    spare = next(i for i in range(EXPERTS) if i not in rank.order)
    rank.step([spare, *rank.order[1:]] if rank.is_wrong else rank.order)


def other_order(rank: Rank) -> None:
    rank.step(rank.order[::-1] if rank.is_wrong else rank.order)


def unit_left_out(rank: Rank) -> None:
    rank.step(rank.order[1:] if rank.is_wrong else rank.order)


def unit_twice(rank: Rank) -> None:
    spare = next(i for i in range(EXPERTS) if i not in rank.order)
    rank.step([*rank.order, spare] if rank.is_wrong else rank.order)


def without_reducing(rank: Rank) -> None:
    """The wrong rank takes its batch for one more of an accumulation."""
    rank.step(sync=not rank.is_wrong)
    rank.step()


def batch_skipped(rank: Rank) -> None:
    """The wrong rank goes on to what comes behind the batch."""
    if not rank.is_wrong:
        rank.step()
    rank.model.clip_grad_norm_(1.0)


def ended_early(rank: Rank) -> None:
    """The wrong rank has no more batches."""
    if not rank.is_wrong:
        rank.step()


KINDS: dict[Callable[[Rank], None], str] = {
    other_unit: "units",
    other_order: "units",
    unit_left_out: "units",
    unit_twice: "units",
    without_reducing: "units",
    batch_skipped: "units",
    ended_early: "left",
}

# Each rank makes as many collectives, of the same shapes, where none is begun ahead:
# over an engine that compares nothing they mix up data, and go on.
UNSEEN_BY_ENGINES = (other_unit, other_order)


def build_other(way: str, group: _C.Communicator, wrong: int) -> Any:
    """The mixture as ranks build it, of which the wrong one differs in one way."""
    differs = group.rank == wrong
    options: dict[str, Any] = {"flatten_parameters": True}
    model = Mixture(0)
    if way == "shape" and differs:
        model.experts[1].register_parameter("bias", None)
    elif way == "another unit" and differs:
        with seeded(1):
            model.experts.append(nn.Linear(WIDTH, WIDTH))
    elif way == "frozen" and differs:
        model.experts[2].bias.requires_grad_(False)
    elif way == "order" and differs:  # of the parameters in a row, of one size
        weight = model.experts[0]._parameters.pop("weight")
        model.experts[0]._parameters["weight"] = weight
    elif way == "dtype" and differs:
        options["compute_dtype"] = "bfloat16"
    elif way == "resharding" and differs:
        options["reshard_after_forward"] = False
    return model.shard(group, options)


# How ranks may build another module, and what is said of the wrong rank.
OTHER_MODULES = {
    "shape": r"^the unit 'experts\.1' with the parameters weight \(12, 12\)$",
    "another unit": r"^the unit 'experts\.3' with the parameters weight",
    "frozen": r"^the unit 'experts\.2' with the parameters .*; bias \(12,\) frozen$",
    "order": r"^the unit 'experts\.0' with the parameters bias \(12,\); weight",
    "dtype": r"^the root with compute_dtype=torch\.bfloat16$",
    "resharding": r"^the unit 'experts\.0' with reshard_after_forward=False$",
}


def run_other(way: str, group: _C.Communicator, wrong: int) -> str | None:
    """What the rank is told; None: nothing, after a step."""
    model = build_other(way, group, wrong)
    try:
        model(torch.ones(2, WIDTH), [0, 1]).square().mean().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def check_other(told: list[str | None], way: str, wrong: int) -> None:
    """All ranks were told which rank has what, and of most ranks with whom they are."""
    for rank, text in enumerate(told):
        assert text is not None, f"{way}: rank {rank} of {len(told)} is quiet"
        assert "ranks have sharded different modules" in text, text
        found = re.search(r"rank (\d) has (.*), and rank (\d) (.*); (\d) of", text)
        assert found, text
        assert {str(wrong)} <= {found[1], found[3]}, text
        of_wrong = found[2] if found[1] == str(wrong) else found[4]
        assert re.search(OTHER_MODULES[way], of_wrong), text
        assert len(told) == 2 or found[1] == str(wrong), text
        assert len(told) == 2 or found[5] == str(len(told) - 1), text


def run(
    group: _C.Communicator,
    kind: Callable[[Rank], None],
    wrong: int,
    seed: int,
    prefetches: bool = True,
    **more: Any,
) -> str | None:
    """What the rank is told, after a step or two that are alike; None: nothing.
    more: options of the units."""
    draw = random.Random(seed)
    order = draw.sample(range(EXPERTS), 2)
    options = {
        "reshard_after_forward": draw.random() < 0.7,
        "flatten_parameters": draw.random() < 0.5,
        "forward_prefetch": draw.random() < 0.3 and prefetches,
    }
    model = Mixture(seed).shard(group, options | more)
    rank = Rank(model, group, order, group.rank == wrong)
    try:
        for _ in range(draw.randrange(kind is batch_skipped, 3)):
            rank.step()
        kind(rank)
        if KINDS.get(kind) == "units":  # what was left out may have been the last
            rank.step()
        if KINDS.get(kind) != "left":
            model.clip_grad_norm_(1.0)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def check(told: list[str | None], kind: Callable[[Rank], None], wrong: int) -> None:
    """All ranks were told, and which one is wrong."""
    for rank, text in enumerate(told):
        if KINDS[kind] == "left" and rank == wrong:
            assert text is None
            continue
        assert text is not None, f"{kind.__name__}: rank {rank} of {len(told)} is quiet"
        if KINDS[kind] == "left":
            assert re.search(rf"rank {wrong} \(process \d+\) has left", text), text
            continue
        assert "ranks use different units, or in different orders" in text, text
        assert re.search(rf"rank {wrong} (gathers|reduces|averages|calls)", text), text
        if len(told) > 2:
            majority = re.search(r"(\d) of (\d) ranks are with rank (\d)", text)
            assert majority, text
            assert majority[1] == str(len(told) - 1), text
            assert majority[3] != str(wrong), text
