"""Trainings in which some parameters get no gradient: they are unused on some ranks or
on all, or frozen for a while. AdamW tells None from zeros: it decays, and momentum
moves on. Plain torch in one process adds up what all ranks' losses give.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
from rank_threads import seeded
from torch import nn

from ctrainer import _C, optim
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import hybrid_groups

BRANCHES, STEPS, WIDTH = 4, 4, 5
Case = dict[str, Any]
Maker = Callable[[nn.Module], torch.optim.Optimizer]
Trained = tuple[dict[str, torch.Tensor], list[dict[str, bool]]]


class Branches(nn.Module):
    """Of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        for i in sorted(used - {BRANCHES}):
            x = x + self.branches[i](x)
        return x * self.scale if BRANCHES in used else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Branches(), Branches()

    def forward(self, x: torch.Tensor, used: list[set[int]]) -> torch.Tensor:
        return self.outer(self.inner(x, used[0]), used[1])  # type: ignore[no-any-return]


def drawn(seed: int) -> Case:
    """The ranks, which branches each uses in each step, and which names are frozen."""
    chance = random.Random(seed)
    world = chance.choice([1, 2, 2, 3, 4])

    def some() -> list[set[int]]:
        among = range(BRANCHES + 1)
        return [set(chance.sample(among, chance.randint(0, 4))) for _ in range(2)]

    flat = chance.random() < 0.7
    differ = flat and chance.random() < 0.7  # lone parameters are reduced one by one
    # A unit without any gradient is reduced by no rank, so each keeps some on all.
    names = [n for n, _ in Model().named_parameters() if not n.endswith("trunk.bias")]
    # A unit that has all gradients is reduced at once, and must be so on all ranks.
    counts = [0] if differ else [0, 3, len(names)]
    used = []
    for _ in range(STEPS):
        alike = some()
        used.append([some() if differ else alike for _ in range(world)])
    return {
        "number": seed,
        "world": world,
        "used": used,
        "frozen": [
            set(chance.sample(names, chance.choice(counts))) for _ in range(STEPS)
        ],
        "options": {
            "flatten_parameters": flat,
            "_shard_size_multiple": chance.choice([1, 128]),
            "reshard_after_forward": chance.random() < 0.5,
            "set_to_none": chance.random() < 0.8,
        },
        "passes": chance.choice(["one", "two", "no_sync"]),
        "hybrid": world == 4 and chance.random() < 0.7,
    }


def rows(step: int, rank: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + part)
    return torch.randn(3, WIDTH, generator=generator)


def freeze(model: nn.Module, names: set[str]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name not in names)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5)


def muon_and_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for matrices."""
    params: list[Any] = list(model.parameters())
    both = [(p, len(getattr(p, "_orig_size", p.shape)) == 2) for p in params]
    return optim.Composite(
        [
            {"params": [p for p, m in both if m], "optimizer": optim.Muon, "lr": 0.02},
            {"params": [p for p, m in both if not m], "lr": 1e-2, "eps": 1e-3},
        ]
    )


def missing(model: nn.Module) -> dict[str, bool]:
    """Of the parameters with elements here whether they have no gradient."""
    named = model.named_parameters()
    return {name: p.grad is None for name, p in named if p.numel() > 0}


def train_whole(case: Case, made: Maker = adamw) -> Trained:
    """By torch, in one process. noise: the seed of changes of the inputs by 1e-7."""
    with seeded(0):
        model = Model()
    source = torch.Generator().manual_seed(case.get("noise", 0))
    size = 1e-7 if "noise" in case else 0.0
    optimizer, told = made(model), []
    for step, (used, frozen) in enumerate(
        zip(case["used"], case["frozen"], strict=True)
    ):
        freeze(model, frozen)
        for rank in range(case["world"]):
            for part in range(1 if case["passes"] == "one" else 2):
                x = rows(step, rank, part)
                x = x * (1 + size * torch.randn(x.shape, generator=source))
                loss = model(x, used[rank]).square().mean()
                (loss / case["world"]).backward()
        told.append(missing(model))
        optimizer.step()
        optimizer.zero_grad(case["options"]["set_to_none"])
    return model.state_dict(), told


def train_sharded(
    case: Case, group: _C.Communicator, made: Maker = adamw, **others: Any
) -> Trained:
    """A rank's part in it; others: options besides those of the case."""
    options = case["options"] | others
    to_none = options.pop("set_to_none")
    options |= {"on_neuron": False, "use_orig_params": True}
    options["process_group"] = hybrid_groups(2, group) if case["hybrid"] else group
    with seeded(0):
        model: Any = Model()
    model.inner = FSDP(model.inner, **options)
    model = FSDP(model, **options)
    optimizer, told = made(model), []
    for step, (used, frozen) in enumerate(
        zip(case["used"], case["frozen"], strict=True)
    ):
        freeze(model, frozen)
        for part in range(1 if case["passes"] == "one" else 2):
            waits = case["passes"] == "no_sync" and part == 0
            with model.no_sync() if waits else contextlib.nullcontext():
                x = rows(step, group.rank, part)
                model(x, used[group.rank]).square().mean().backward()
        told.append(missing(model))
        optimizer.step()
        optimizer.zero_grad(to_none)
    return model.full_state_dict(), told


def compare(case: Case, found: Trained, expected: Trained, exact: bool) -> None:
    """The same parameters have no gradient in the same steps; and where rounding is
    float32's the values are the same."""
    for step, (here, plain) in enumerate(zip(found[1], expected[1], strict=True)):
        wrong = [name for name in here if here[name] != plain[name]]
        assert not wrong, (step, wrong, case)
    for name, value in expected[0].items():
        difference = (found[0][name] - value).abs().max().item()
        assert difference < 1e-5 or not exact, (name, difference, case)
