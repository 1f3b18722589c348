"""Parameters by their own names that get no gradient: unused on some ranks or on all,
or frozen for a while. AdamW tells None from zeros: it decays, and momentum moves on.
The reference is plain torch in one process, which adds up what all ranks' losses give.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from draws import draws
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C
from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import hybrid_groups

BRANCHES, STEPS, WIDTH = 4, 4, 5


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


def drawn(seed: int) -> dict[str, Any]:
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


def train_whole(case: dict[str, Any], model: nn.Module) -> None:
    optimizer = adamw(model)
    for step, (used, frozen) in enumerate(
        zip(case["used"], case["frozen"], strict=True)
    ):
        freeze(model, frozen)
        for rank in range(case["world"]):
            for part in range(1 if case["passes"] == "one" else 2):
                loss = model(rows(step, rank, part), used[rank]).square().mean()
                (loss / case["world"]).backward()
        optimizer.step()
        optimizer.zero_grad(case["options"]["set_to_none"])


def train_sharded(case: dict[str, Any], group: _C.Communicator) -> dict[str, Any]:
    options = dict(case["options"])
    to_none = options.pop("set_to_none")
    options |= {"on_neuron": False, "use_orig_params": True}
    options["process_group"] = hybrid_groups(2, group) if case["hybrid"] else group
    with seeded(0):
        model: Any = Model()
    model.inner = FSDP(model.inner, **options)
    model = FSDP(model, **options)
    optimizer = adamw(model)
    for step, (used, frozen) in enumerate(
        zip(case["used"], case["frozen"], strict=True)
    ):
        freeze(model, frozen)
        for part in range(1 if case["passes"] == "one" else 2):
            waits = case["passes"] == "no_sync" and part == 0
            with model.no_sync() if waits else contextlib.nullcontext():
                x = rows(step, group.rank, part)
                model(x, used[group.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(to_none)
    return model.full_state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(draws(24, 1000)))
def test_a_parameter_without_a_gradient_stays_as_it_is(seed: int) -> None:
    case = drawn(seed)
    with seeded(0):
        whole = Model()
    train_whole(case, whole)

    def train(group: _C.Communicator) -> None:
        found = train_sharded(case, group)
        for name, value in whole.state_dict().items():
            difference = (found[name] - value).abs().max().item()
            assert difference < 1e-5, (name, difference, case)

    on_ranks(case["world"], train)


def test_a_gradient_of_negative_zeros_is_one() -> None:
    """It counts where any rank has it, also if all that it has is -0."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(())) for _ in "ab")

        def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
            return (self.a * x + (self.b * x * -0.0 if used else 0.0)).sum()

    def train(group: _C.Communicator) -> None:
        model = FSDP(
            Scaled(), on_neuron=False, use_orig_params=True, flatten_parameters=True,
            process_group=group, _shard_size_multiple=1,
        )  # fmt: skip
        for used, expected in ((False, False), (group.rank == 1, True)):
            model(torch.ones(2), used).backward()
            views = dict(model.named_parameters())
            mine = views["b"].numel() > 0
            assert not mine or (views["b"].grad is not None) == expected
            model.zero_grad()

    on_ranks(2, train)


@pytest.mark.parametrize("views", [False, True])
def test_hooks_that_would_not_be_called_are_turned_down(views: bool) -> None:
    def register(group: _C.Communicator) -> None:
        with seeded(0):
            module = Model()
        model = FSDP(
            module, on_neuron=False, use_orig_params=views, process_group=group
        )
        for param in model.parameters():
            with pytest.raises(RuntimeError, match="takes no hooks"):
                param.register_hook(lambda grad: grad)
            with pytest.raises(RuntimeError, match="takes no hooks"):
                param.register_post_accumulate_grad_hook(lambda param: None)

    on_ranks(2, register)
