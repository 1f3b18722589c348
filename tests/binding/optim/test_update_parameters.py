"""One update of any optimizer by itself: against torch's clipping and steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ctrainer import _C, adapters, optim


def parameters(scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for shape in [(40, 7), (33,), (1,)]:
        made.append(nn.Parameter(torch.randn(shape, generator=generator)))
        made[-1].grad = torch.randn(shape, generator=generator) * scale
    return [*made, nn.Parameter(torch.ones(2))]  # the last without a gradient


def update(optimizer: Any, max_norm: float, skips: bool, **options: Any) -> Any:
    adapter = adapters.for_model(nn.Linear(1, 1))
    return _C.update_parameters(optimizer, adapter, max_norm, skips, **options)


def same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


# Of ctrainer the engine clips in its pass; the rest is clipped in place.
@pytest.mark.parametrize("cls", [optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_are_unscaled_clipped_used_and_dropped(
    cls: Any, max_norm: float, scale: float
) -> None:
    ours, theirs = parameters(scale), parameters()
    made = cls(ours, lr=0.1)
    scaler = None if scale == 1.0 else _C.LossScaler.static(scale)
    norm, updated = update(made, max_norm=max_norm, skips=True, scaler=scaler)
    wanted = nn.utils.clip_grad_norm_(theirs, max_norm or math.inf).item()
    torch.optim.SGD(theirs, lr=0.1).step()
    assert updated
    assert norm == pytest.approx(wanted, rel=1e-6)
    same(ours, theirs)
    assert all(param.grad is None for param in ours)


@pytest.mark.parametrize("cls", [optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_skipped_or_used(cls: Any, bad: float) -> None:
    scaler = _C.LossScaler.deepspeed(initial_scale_power=4, hysteresis=1)
    ours, before = parameters(), parameters()
    ours[1].grad[3] = bad  # type: ignore[index]
    norm, updated = update(cls(ours, lr=0.1), max_norm=1.0, skips=True, scaler=scaler)
    assert not updated
    assert not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    assert all(param.grad is None for param in ours)
    assert scaler.scale == 8.0
    ours[1].grad = torch.full((33,), bad)
    assert update(cls(ours, lr=0.1), max_norm=0.0, skips=False)[1]
    assert not ours[1].isfinite().any()


def test_what_cannot_be_read_changes_nothing() -> None:
    ours, before = parameters(), parameters()
    made = optim.SGD(ours, lr=0.1)
    with pytest.raises(ValueError, match="max_norm"):
        update(made, max_norm=-1.0, skips=True)
    with pytest.raises(TypeError, match="Communicator"):
        update(made, max_norm=1.0, skips=True, shards=3)
    with pytest.raises(AttributeError, match="scale"):
        update(made, max_norm=1.0, skips=True, scaler=3)
    same(ours, before)
    assert ours[0].grad is not None
