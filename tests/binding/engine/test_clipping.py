"""Clipping by norm of any type, by value and by group: as torch's functions do it."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, make, rows
from torch import nn

import ctrainer
from ctrainer import optim
from ctrainer.adapters import _numpy_model, _numpy_optim, _torch_optim
from ctrainer.adapters import numpy as numpy_adapter

TYPES = [1.0, 2.0, 3.0, 0.5, 2.5, math.inf]
Parameters = list[nn.Parameter]


def parameters(dtype: torch.dtype) -> Parameters:
    generator = torch.Generator().manual_seed(3)
    made = []
    for shape in [(40, 7), (33,), (5, 3, 2), (1,)]:
        made.append(nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        made[-1].grad = torch.randn(shape, generator=generator).to(dtype)
    return made


def tolerance(dtype: torch.dtype) -> float:
    """Relative, of a norm: torch adds 344 powers in dtype, each addition off by half a
    unit at most, and a power and a root by one; the root of p = 0.5 doubles it."""
    return 2 * (344 + 4) * torch.finfo(dtype).eps


def assert_same_update(ours: Parameters, theirs: Parameters) -> None:
    """With a step of the clipped gradient, whose elements are below 5."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5 * tolerance(a.dtype))


def clip(
    params: Parameters, max_norm: float | None, p: float, value: float | None
) -> float:
    norm = math.nan
    if max_norm is not None:
        norm = nn.utils.clip_grad_norm_(params, max_norm, p).item()
    if value is not None:
        nn.utils.clip_grad_value_(params, value)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", TYPES)
@pytest.mark.parametrize(
    ("max_norm", "value"), [(0.5, None), (1e9, 0.4), (None, 0.4), (3.0, 0.1)]
)
def test_a_step_clips_as_torch_s_functions(
    dtype: torch.dtype, p: float, max_norm: float | None, value: float | None
) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    opt, ref = optim.SGD(ours, lr=1.0), torch.optim.SGD(theirs, lr=1.0)
    norm = clip(theirs, max_norm, p, value)
    ref.step()
    opt.step(max_norm=max_norm, norm_type=p, clip_value=value)
    if max_norm is not None:
        assert opt.grad_norm == pytest.approx(norm, rel=tolerance(dtype))
    assert_same_update(ours, theirs)


@pytest.mark.parametrize("p", TYPES)
def test_groups_are_clipped_by_themselves(p: float) -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    opt = optim.SGD([{"params": ours[:2]}, {"params": ours[2:]}], lr=1.0)
    clip(theirs[:2], 1.5, p, None)
    clip(theirs[2:], 1.5, p, None)
    torch.optim.SGD(theirs, lr=1.0).step()
    opt.step(max_norm=1.5, norm_type=p, clip_by_group=True)
    assert_same_update(ours, theirs)


@pytest.mark.parametrize("own", [0.25, 0, math.inf])
@pytest.mark.parametrize("rest", [None, 1.0])
def test_a_group_s_own_maximum_wins_and_the_rest_is_clipped_together(
    own: float, rest: float | None
) -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    groups = [
        {"params": ours[:1]},
        {"params": ours[1:2], "max_grad_norm": own},
        {"params": ours[2:], "max_grad_norm": None},
    ]
    opt = optim.SGD(groups, lr=1.0)
    clip(theirs[1:2], own or math.inf, 2.0, None)
    clip([theirs[0], *theirs[2:]], rest, 2.0, None)
    torch.optim.SGD(theirs, lr=1.0).step()
    opt.step(max_norm=rest)
    assert_same_update(ours, theirs)


def test_clipping_in_one_step_does_not_clip_the_next() -> None:
    ours = parameters(torch.float64)
    opt = optim.SGD(ours, lr=1.0)
    opt.step(max_norm=0.1)
    before = [p.detach().clone() for p in ours]
    opt.step()
    for a, b in zip(ours, before, strict=True):
        assert a.grad is not None
        assert torch.equal(a, b - a.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_type": 0.0}, "norm_type is 0.0; expected a number > 0"),
        ({"norm_type": -1.0}, "norm_type is -1.0"),
        ({"norm_type": math.nan}, "norm_type is nan"),
        ({"clip_value": 0.0}, "clip_value is 0.0"),
        ({"clip_value": -math.inf}, "clip_value is -inf"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    params = parameters(torch.float32)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=message):
        optim.SGD(params).step(**options)
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_bad_maximum_of_a_group_is_named(bad: float) -> None:
    opt = optim.SGD([{"params": parameters(torch.float32), "max_grad_norm": bad}])
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['max_grad_norm'\]"):
        opt.step()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("p", TYPES)
def test_a_bad_gradient_is_found_by_every_norm(bad: float, p: float) -> None:
    params = parameters(torch.float32)
    assert params[1].grad is not None
    params[1].grad[17] = bad
    opt = optim.SGD(params)
    before = [param.detach().clone() for param in params]
    opt.step(max_norm=1.0, norm_type=p, clip_value=0.5, nonfinite="skip")
    assert not opt._engine.finite
    assert not opt._engine.updated
    assert all(map(torch.equal, params, before))


def test_numpy_s_optimizers_clip_likewise() -> None:
    theirs = parameters(torch.float64)
    ours = [_numpy_model.Parameter(p.detach().numpy().copy()) for p in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert b.grad is not None
        a.grad = b.grad.numpy().copy()
    clip(theirs, 1.0, 1.0, 0.002)
    torch.optim.SGD(theirs, lr=1.0).step()
    _numpy_optim.SGD(ours, lr=1.0).step(max_norm=1.0, norm_type=1.0, clip_value=0.002)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.data, b.detach().numpy(), rtol=1e-12, atol=1e-13)


# What the frameworks do on their devices


@pytest.mark.parametrize("p", TYPES)
@pytest.mark.parametrize("adapter", [_torch_optim, numpy_adapter])
def test_norms_and_clipping_on_a_device_equal_ours(adapter: Any, p: float) -> None:
    params = parameters(torch.float64)
    wrapped: list[Any] = list(params)
    if adapter is numpy_adapter:
        wrapped = [_numpy_model.Parameter(x.detach().numpy()) for x in params]
        for a, b in zip(wrapped, params, strict=True):
            assert b.grad is not None
            a.grad = b.grad.numpy()

    groups = [{"params": wrapped[:1]}, {"params": wrapped[1:]}]
    holder = types.SimpleNamespace(param_groups=groups)

    def flat_grads() -> list[torch.Tensor]:
        grads = [x.grad.flatten() for x in params if x.grad is not None]
        return [grads[0].clone(), torch.cat(grads[1:])]

    flat = flat_grads()
    norms = adapter.grad_norms(holder, p, True)
    assert norms == pytest.approx([f.norm(p).item() for f in flat], rel=1e-12)
    every = adapter.grad_norms(holder, p, False)
    assert every == pytest.approx([torch.cat(flat).norm(p).item()], rel=1e-12)

    adapter.clip_grads(holder, [0.5, 1.0], 0.3)
    after = flat_grads()
    assert torch.equal(after[0], (flat[0] * 0.5).clamp(-0.3, 0.3))
    assert torch.equal(after[1], flat[1].clamp(-0.3, 0.3))


# In the trainer


class Device(ctrainer.Trainer):
    """A trainer that takes its gradients for those of a device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inputs_stay = False


class Looks(ctrainer.TrainerCallback):
    """Somebody who looks at clipped gradients."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.seen.append([p.grad.clone() for p in model.parameters()])


def batches() -> list[dict[str, torch.Tensor]]:
    data = rows(48)
    parts = [data[i : i + 8] for i in range(0, 48, 8)]
    return [{k: torch.stack([r[k] for r in part]) for k in part[0]} for part in parts]


def reference(p: float, value: float | None, own: float | None) -> Parameters:
    model = Net()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for batch in batches():
        model(**batch)["loss"].backward()
        if own is None:
            clip(params, 0.5, p, None)
        else:
            clip(params[:1], own, p, None)
            clip(params[1:], 0.5, p, None)
        clip(params, None, p, value)
        optimizer.step()
        optimizer.zero_grad()
    return params


@pytest.mark.parametrize("kind", ["ours", "looked at", "torch's", "device"])
@pytest.mark.parametrize(
    ("p", "value", "own"),
    [(1.0, None, None), (math.inf, 0.05, None), (2.0, 0.05, 0.1), (3.0, None, 0.1)],
)
def test_a_run_clips_as_torch_s_functions(
    kind: str, p: float, value: float | None, own: float | None
) -> None:
    model = Net()
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:]}]
    if own is not None:
        groups[0]["max_grad_norm"] = own
    source = torch.optim if kind in ("torch's", "device") else optim
    looks = Looks()
    trainer = make(
        Device if kind == "device" else ctrainer.Trainer, model, rows(48),
        num_train_epochs=1, train_sampling_strategy="sequential", max_grad_norm=0.5,
        grad_norm_type=p, max_grad_value=value, lr_scheduler_type="constant",
        callbacks=[looks] if kind == "looked at" else [],
        parts={"optimizers": (source.SGD(groups, lr=0.1), None)},
    )  # fmt: skip
    trainer.train()
    for a, b in zip(params, reference(p, value, own), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if kind == "looked at":
        assert len(looks.seen) == 6
        largest = max(g.abs().max().item() for grads in looks.seen for g in grads)
        assert value is None or largest == torch.tensor(value).item()


def test_clip_by_group_bounds_each_group_s_norm() -> None:
    looks = Looks()
    trainer = make(
        ctrainer.Trainer, Net(), rows(48), max_steps=3, max_grad_norm=0.125,
        clip_by_group=True, callbacks=[looks],
    )  # fmt: skip
    trainer.train()
    index = {id(p): i for i, p in enumerate(trainer.model.parameters())}
    groups = [g["params"] for g in trainer.optimizer.param_groups if g["params"]]
    assert len(groups) == 2
    for grads in looks.seen:
        for group in groups:
            norm = torch.cat([grads[index[id(p)]].flatten() for p in group]).norm()
            assert norm.item() == pytest.approx(0.125, rel=1e-4)


@pytest.mark.parametrize("source", [optim, torch.optim])
def test_parameters_beside_the_model_s_are_not_clipped(source: Any) -> None:
    beside = nn.Parameter(torch.zeros(()))

    class Weighs(ctrainer.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **rest: Any) -> Any:
            return super().compute_loss(model, inputs, **rest) + 500.0 * beside

    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = source.SGD([*model.parameters(), beside], lr=1.0)
    trainer = make(
        Weighs, model, rows(), max_steps=1, max_grad_norm=0.25,
        lr_scheduler_type="constant", parts={"optimizers": (optimizer, None)},
    )  # fmt: skip
    trainer.train()
    assert beside.item() == -500.0
    parts = zip(model.parameters(), before, strict=True)
    moved = torch.cat([(a - b).flatten() for a, b in parts]).norm().item()
    logged = [h["grad_norm"] for h in trainer.state.log_history if "loss" in h]
    assert 0.25 < logged[0] < 100.0
    assert moved == pytest.approx(0.25, rel=1e-5)
    assert "_clip_grad_norm" not in vars(trainer)


@pytest.mark.parametrize("source", [optim, torch.optim])
def test_values_are_clipped_after_an_override_of_clipping(source: Any) -> None:
    class Fills(ctrainer.Trainer):
        def _clip_grad_norm(self, model: Any) -> float:
            assert super()._clip_grad_norm(model) > 0.25
            norms = [p.grad.norm() for p in model.parameters()]
            assert torch.stack(norms).norm().item() == pytest.approx(0.25, rel=1e-5)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3.0)
            return 7.0

    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    trainer = make(
        Fills, model, rows(), max_steps=1, max_grad_norm=0.25, max_grad_value=0.5,
        lr_scheduler_type="constant",
        parts={"optimizers": (source.SGD(model.parameters(), lr=1.0), None)},
    )  # fmt: skip
    trainer.train()
    for a, b in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(a, b - 0.5)
    assert [h["grad_norm"] for h in trainer.state.log_history if "loss" in h] == [7.0]
