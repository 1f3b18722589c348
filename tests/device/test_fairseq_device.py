"""fairseq's Trainer on a device: our kernels update the model there, and a run is the
one on the host, where it is held against fairseq's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import any_gpu
import fairseq_tiny as tiny
import pytest
import torch

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.adapters.fairseq_optimizer import FairseqOptimizer

UPDATES = 6
# Without a norm of gradients a run has the same bits: sums are added in another order.
EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"optimizer___name": "sgd", "optimizer__momentum": 0.9},
    "adamax": {"optimizer___name": "adamax"},
    "accumulated": {"optimization__update_freq": [2]},
    "average": {"ema__store_ema": True, "ema__ema_decay": 0.5},
    "average in float32": {
        "ema__store_ema": True,
        "ema__ema_decay": 0.5,
        "ema__ema_fp32": True,
    },
}
AVERAGES = ("average", "average in float32")
CLOSE: dict[str, dict[str, Any]] = {
    "clipped": {"optimization__clip_norm": 0.5},
    "fp16": {"common__fp16": True},
    "fp16, memory-efficient": {"common__memory_efficient_fp16": True},
    "fp16, not flat": {"common__fp16": True, "common__fp16_no_flatten_grads": True},
    "bf16": {"common__bf16": True},
    "amp": {"common__amp": True},
    "adafactor": {"optimizer___name": "adafactor", "optimizer__relative_step": False},
}


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


def trained(on_host: bool, **changes: Any) -> Any:
    trainer = tiny.trainer(common__cpu=on_host, **changes)
    freq = changes.get("optimization__update_freq", [1])[0]
    batches = tiny.batches(UPDATES * freq)
    for i in range(0, len(batches), freq):
        trainer.train_step(batches[i : i + freq])
    kind = "cpu" if on_host else any_gpu.KIND
    assert {p.device.type for p in trainer.model.parameters()} == {kind}
    assert trainer.get_num_updates() > 0
    return trainer


class Foreign(FairseqOptimizer):
    """Of fairseq's plugins: torch updates, we measure, clip and divide."""

    def __init__(self, params: Any) -> None:
        one_by_one: dict[str, Any] = {"foreach": False}  # on every device
        super().__init__(None, torch.optim.SGD(params, lr=0.1, **one_by_one))


def weights(trainer: Any) -> list[torch.Tensor]:
    return [p.detach().cpu().float() for p in trainer.model.parameters()]


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_a_run_on_the_device_is_that_on_the_host(name: str) -> None:
    changes = {**EXACT, **CLOSE}[name]
    here, there = (trained(on_host, **changes) for on_host in (True, False))
    assert here.get_num_updates() == there.get_num_updates()
    for a, b in zip(weights(here), weights(there), strict=True):
        any_gpu.assert_same(b, a, 0.0 if name in EXACT else 1e-6)


def stepped(device: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Updates by an optimizer of torch's, clipped by us."""
    draws = torch.Generator().manual_seed(3)
    shapes = [(5, 3), (7,), ()]
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=draws).to(device, dtype))
        for shape in shapes
    ]
    optimizer = Foreign(params)
    norms = []
    for _ in range(4):
        optimizer.zero_grad()
        for p in params[:2]:
            p.grad = torch.randn(p.shape, generator=draws).to(device, dtype)
        optimizer.multiply_grads(0.25)
        norms.append(optimizer.clip_grad_norm(0.5))
        optimizer.step()
    return [p.detach().cpu() for p in [*params, *norms]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_optimizers_get_gradients_that_our_kernels_have_clipped(
    gpu: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "grad_norm", None)
    monkeypatch.setattr(tools, "divide_grads", None)
    for a, b in zip(stepped("cpu", dtype), stepped(gpu, dtype), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_gradients_on_two_devices_are_measured_by_torch(gpu: torch.device) -> None:
    params = [torch.nn.Parameter(torch.ones(3, device=d)) for d in ("cpu", gpu)]
    optimizer = Foreign(params[:1])
    optimizer.optimizer.add_param_group({"params": params[1:]})
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    optimizer.multiply_grads(0.5)
    assert optimizer.clip_grad_norm(0.0).item() == pytest.approx(6**0.5)
    optimizer.step()
    for p in params:
        assert p.grad.cpu().tolist() == [1.0] * 3
        assert p.tolist() == pytest.approx([0.9] * 3)


@pytest.mark.parametrize(
    "changes", [CLOSE["clipped"], CLOSE["fp16"], CLOSE["adafactor"], EXACT["average"]]
)
def test_no_memory_is_taken_after_the_second_update(changes: dict[str, Any]) -> None:
    trainer = tiny.trainer(common__cpu=False, **changes)
    before, taken = any_gpu.allocations(), []
    for batch in tiny.batches(UPDATES):
        trainer.train_step([batch])
        taken.append(any_gpu.allocations())
    assert taken[1:] == [taken[1]] * (UPDATES - 1)
    assert taken[1] > before  # it is counted


@pytest.mark.parametrize("saved_on_host", [True, False])
@pytest.mark.parametrize("name", ["plain", "fp16", *AVERAGES, "adafactor"])
def test_a_run_resumes_on_the_other_device(
    tmp_path: Path, name: str, saved_on_host: bool
) -> None:
    changes = {**EXACT, **CLOSE}[name] | {"checkpoint__save_dir": str(tmp_path)}
    batches = tiny.batches(UPDATES)
    whole = trained(saved_on_host, **changes)
    half = tiny.trainer(common__cpu=saved_on_host, **changes)
    for batch in batches[:3]:
        half.train_step([batch])
    half.save_checkpoint(str(tmp_path / "a.pt"), {})
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert {v.device.type for v in state["model"].values()} == {"cpu"}
    other = tiny.trainer(common__cpu=not saved_on_host, **changes)
    other.load_checkpoint(str(tmp_path / "a.pt"))
    for batch in batches[3:]:
        other.train_step([batch])
    for a, b in zip(weights(whole), weights(other), strict=True):
        any_gpu.assert_same(b, a, 1e-6)
    if name in AVERAGES:
        found, expected = (t.ema.get_model().state_dict() for t in (other, whole))
        for key, value in expected.items():
            any_gpu.assert_same(found[key], value, 1e-6)
