"""Functions of torch that would take a rank's shards for whole parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_threads import on_ranks, seeded
from torch import nn
from torch.nn.utils import clip_grad_norm_  # before a module is wrapped

from ctrainer import _C
from ctrainer.compat.fairscale import ShardedGradScaler
from ctrainer.fsdp import FullyShardedDataParallel as FSDP

OPTIONS: list[dict[str, Any]] = [
    {}, {"use_orig_params": True}, {"flatten_parameters": True},
    {"use_orig_params": True, "flatten_parameters": True},
]  # fmt: skip


def trained(group: _C.Communicator, **options: Any) -> tuple[Any, Any]:
    """A sharded module with gradients, and its optimizer."""
    with seeded(0):
        layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model = FSDP(layers, process_group=group, on_neuron=False, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    return model, optimizer


def grads(params: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in params if p.grad is not None]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torchs_clipping_of_shards_raises_and_scales_nothing(
    options: dict[str, Any],
) -> None:
    def train(group: _C.Communicator) -> None:
        model, _ = trained(group, **options)
        before = grads(model.parameters())
        with pytest.raises(
            RuntimeError, match=r"use model\.clip_grad_norm_\(max_norm\)"
        ):
            clip_grad_norm_(model.parameters(), 0.1)
        for now, old in zip(grads(model.parameters()), before, strict=True):
            assert torch.equal(now, old)
        assert float(model.clip_grad_norm_(0.1)) > 0.1

    on_ranks(2, train)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_rank_has_whole_parameters(options: dict[str, Any]) -> None:
    def train(group: _C.Communicator) -> None:
        model, _ = trained(group, **options)
        other, _ = trained(group, **options)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, other.clip_grad_norm_(0.1))
        for ours, theirs in zip(
            grads(model.parameters()), grads(other.parameters()), strict=True
        ):
            torch.testing.assert_close(ours, theirs)

    on_ranks(1, train)


def unscale(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)


def step(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)


@pytest.mark.parametrize("use", [unscale, step])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loss_scale_of_one_rank_raises(
    options: dict[str, Any], use: Callable[[Any, Any], None]
) -> None:
    def train(group: _C.Communicator) -> None:
        model, optimizer = trained(group, **options)
        before = [p.detach().clone() for p in model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match=r"compat\.fairscale.ShardedGradScaler"):
            use(scaler, optimizer)
        for now, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(now, old)
        agreeing = ShardedGradScaler(init_scale=2.0, process_group=group)
        agreeing.scale(torch.ones(()))
        use(agreeing, optimizer)

    on_ranks(2, train)


def test_other_models_are_clipped_and_scaled_by_torch() -> None:
    def train(group: _C.Communicator) -> None:
        trained(group)  # guards are in place

    on_ranks(2, train)
    plain = nn.Linear(3, 3)
    plain(torch.ones(1, 3)).sum().backward()
    expected = copy.deepcopy(plain)
    for param, other in zip(plain.parameters(), expected.parameters(), strict=True):
        assert param.grad is not None
        other.grad = param.grad / 4
    total = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()  # type: ignore[union-attr]
    assert torch.equal(clip_grad_norm_(plain.parameters(), 1e9), total)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(plain.parameters(), 0.1))
    for param, other in zip(plain.parameters(), expected.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)  # type: ignore[arg-type]
