"""Parameters by their own names that get no gradient are left as they are."""

from __future__ import annotations

from typing import Any

import missing_gradients as trainings
import pytest
import torch
from draws import draws
from rank_threads import on_ranks, seeded
from torch import nn

from ctrainer import _C, optim
from ctrainer.fsdp import FullyShardedDataParallel as FSDP


@pytest.mark.parametrize("seed", range(draws(24, 1000)))
def test_a_parameter_without_a_gradient_stays_as_it_is(seed: int) -> None:
    case = trainings.drawn(seed)
    expected = trainings.train_whole(case)

    def train(group: _C.Communicator) -> None:
        found = trainings.train_sharded(case, group)
        trainings.compare(case, found, expected, exact=True)

    on_ranks(case["world"], train)


@pytest.mark.parametrize("seed", range(draws(4, 200)))
@pytest.mark.parametrize(
    "options",
    [
        {"reduce_bits": 8},
        {"reduce_bits": 4, "error_feedback": False},
        {"reduce_bits": 8, "compute_dtype": "bfloat16"},
        {"compute_dtype": "bfloat16"},
        {"compute_dtype": "float16"},
    ],
    ids=["8 bits", "4 bits", "8 bits of bfloat16", "bfloat16", "float16"],
)
def test_none_is_told_from_zeros_however_gradients_are_reduced(
    options: dict[str, Any], seed: int
) -> None:
    case = trainings.drawn(seed)
    expected = trainings.train_whole(case)

    def train(group: _C.Communicator) -> None:
        found = trainings.train_sharded(case, group, **options)
        trainings.compare(case, found, expected, exact=False)

    on_ranks(case["world"], train)


@pytest.mark.parametrize("seed", range(draws(6, 200)))
@pytest.mark.parametrize("kind", ["LAMB", "Adafactor", "LARS", "Muon"])
def test_optimizers_of_whole_parameters_update_what_any_rank_has_used(
    kind: str, seed: int
) -> None:
    """A rank without a part of a parameter may not have used it, and joins the rest."""
    case = trainings.drawn(seed) | {"hybrid": False}
    options: dict[str, Any] = {"lr": 1e-2}
    if kind == "Adafactor":
        options |= {"relative_step": False, "scale_parameter": False}

    def made(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "Muon":
            return trainings.muon_and_adamw(model)
        optimizer: torch.optim.Optimizer = getattr(optim, kind)(
            model.parameters(), **options
        )
        return optimizer

    expected = trainings.train_whole(case, made)
    # Where a gradient is next to nothing its sign decides, and rounding that. Muon
    # rounds to bfloat16: inputs changed by a rounding move the same training so far.
    most = dict.fromkeys(expected[0], 1e-4 if kind == "Muon" else 2e-3)
    for noise in range(8 if kind == "Muon" else 0):
        moved = trainings.train_whole(case | {"noise": noise}, made)[0]
        for name, value in expected[0].items():
            most[name] = max(most[name], 2 * (moved[name] - value).abs().max().item())

    def train(group: _C.Communicator) -> None:
        found = trainings.train_sharded(case, group, made)
        trainings.compare(case, found, expected, exact=False)
        for name, value in expected[0].items():
            difference = (found[0][name] - value).abs().max().item()
            assert difference < most[name], (name, difference, case)

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
            module = trainings.Model()
        model = FSDP(
            module, on_neuron=False, use_orig_params=views, process_group=group
        )
        for param in model.parameters():
            with pytest.raises(RuntimeError, match="takes no hooks"):
                param.register_hook(lambda grad: grad)
            with pytest.raises(RuntimeError, match="takes no hooks"):
                param.register_post_accumulate_grad_hook(lambda param: None)

    on_ranks(2, register)
