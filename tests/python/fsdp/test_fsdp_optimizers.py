"""Optimizers that look at whole parameters, over parts of them, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsdp_scenarios import check_parameters, mse, nested, tree
from missing_gradients import muon_and_adamw
from rank_threads import on_ranks
from torch import nn

from ctrainer import _C, optim
from ctrainer.trainer import shards

UPDATES = 20
FLAT: dict[str, Any] = {"use_orig_params": True, "_shard_size_multiple": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "views of rows": FLAT,
    "views by rows": {
        "use_orig_params": True,
        "flatten_parameters": False,
        "shard_param_on_dim_0": True,
    },
    "shards": {"flatten_parameters": False},
}


MADE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "LAMB": lambda model: optim.LAMB(model.parameters(), lr=1e-2, weight_decay=0.1),
    "LARS": lambda model: optim.LARS(
        model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1
    ),
    "Adafactor": lambda model: optim.Adafactor(model.parameters(), beta1=0.9),
    "Muon": muon_and_adamw,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MADE)
def test_updates_are_those_of_one_process(name: str, layout: str) -> None:
    world = 3 if layout == "views of rows" else 2

    def work(group: _C.Communicator) -> None:
        whole, sharded = tree(), nested(group, tree(), **LAYOUTS[layout])
        expected = train(whole, MADE[name](whole))
        losses = train(sharded, MADE[name](sharded))
        assert losses == pytest.approx(expected, rel=1e-5)
        check_parameters(sharded, whole)

    on_ranks(world, work)


@pytest.mark.parametrize("layout", ["views of rows", "views by rows"])
def test_compact_state_of_shards_cut_anywhere_stays_with_them(layout: str) -> None:
    """Groups begin with a rank's elements, and values round another way than in one
    process: losses stay within a hundredth."""
    plain = tree()
    whole = copy.deepcopy(plain)
    expected = train(whole, optim.AdamWCompact(whole.parameters(), lr=1e-2))

    def work(group: _C.Communicator) -> list[float]:
        sharded = nested(group, copy.deepcopy(plain), **LAYOUTS[layout])
        optimizer = optim.AdamWCompact(sharded.parameters(), lr=1e-2)
        losses = train(sharded, optimizer)
        with pytest.raises(ValueError, match=r"'exp_avg_scale' has shape .* together"):
            sharded.full_optim_state_dict(sharded, optimizer)
        return losses

    for losses in on_ranks(2, work):
        assert losses == pytest.approx(expected, rel=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """All ranks have all of the batch, so that gradients are those of one process."""
    losses = []
    for step in range(UPDATES):
        loss = mse(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_trainer_rejects_parameters_beside_the_model_s() -> None:
    model, loss = nn.Linear(2, 2), nn.Linear(3, 4, bias=False)
    run: Any = SimpleNamespace(
        model=model,
        _shard_group=object(),
        optimizer=torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1),
    )
    with pytest.raises(ValueError, match=r"not the model's, of shape \(4, 3\)"):
        shards.check_optimizer(run)
    run.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards.check_optimizer(run)
