"""Optimizers and averages on a device: what they make of parameters, state and averages
is what they make in the host's memory, bit for bit where no sum is involved. The host's
numbers are held against torch's and papers' in tests/binding/optim."""

from __future__ import annotations

import copy
import random
from typing import Any

import any_gpu
import emulated_torch
import pytest
import torch
from draws import draws
from ranks import run_alone
from torch import nn

import ctrainer
from ctrainer import _C, optim

ELEMENTWISE = {
    "AdEMAMix": {}, "AdEMAMix8bit": {}, "Adadelta": {"lr": 0.5}, "Adagrad": {},
    "Adam": {"amsgrad": True}, "Adam8bit": {}, "AdamW": {}, "AdamW8bit": {},
    "AdamWCompact": {}, "AdamWScheduleFree": {"warmup_steps": 2}, "Adamax": {},
    "FairseqAdam": {}, "LionCompact": {},
    "FairseqAdamax": {}, "FairseqNAG": {"lr": 0.1, "momentum": 0.9}, "Lion": {},
    "Lion8bit": {}, "NAdam": {}, "RAdam": {}, "RAdamScheduleFree": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "SGD": {"lr": 0.1, "momentum": 0.9}, "SGDScheduleFree": {"lr": 0.1},
}  # fmt: skip
WHOLE = {
    "Adafactor": {}, "LAMB": {"weight_decay": 0.1}, "Muon": {},
    "LARS": {"lr": 0.1, "momentum": 0.9},
}  # fmt: skip
SHAPES = [(3, 5), (7,), (), (0,), (2, 3, 4), (65, 70)]
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return any_gpu.device()


def parameters(
    generator: torch.Generator, dtype: torch.dtype, shapes: Any
) -> list[nn.Parameter]:
    values = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    found = [nn.Parameter(value) for value in values]
    return found


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, in memory from the last dimension to the first."""
    back = tuple(range(tensor.ndim))[::-1]
    return tensor.permute(back).contiguous().permute(back)


def made(name: str, params: list[nn.Parameter], options: dict[str, Any]) -> Any:
    optimizer = getattr(optim, name)(params, **options)
    if "ScheduleFree" in name:
        optimizer.train()
    return optimizer


def on_host(optimizer: Any) -> list[torch.Tensor]:
    """Parameters and the arrays of their state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p.detach().cpu() for p in params]
    for param in params:
        state = optimizer.state.get(param, {})
        found += [
            v.cpu() if isinstance(v, torch.Tensor) else torch.tensor(v)
            for _, v in sorted(state.items())
        ]
    return found


def cloned(state: Any) -> Any:
    """A state_dict() with copies of its tensors."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: cloned(value) for key, value in state.items()}
    return [cloned(value) for value in state] if isinstance(state, list) else state


def drawn_step(draw: random.Random, exact: bool) -> dict[str, Any]:
    """Keywords of step(). Norms are added in another order on a device."""
    return {
        "max_norm": None if exact or draw.random() < 0.5 else 0.5,
        "clip_value": draw.choice([None, 0.25]),
        "loss_scale": draw.choice([1.0, 8.0]),
        "nonfinite": draw.choice(["keep", "skip"]),
        "zero_grads": draw.random() < 0.5,
    }


@pytest.mark.parametrize("seed", range(draws(40, 1000)))
@pytest.mark.parametrize("whole", [False, True])
def test_an_update_on_the_device_is_that_on_the_host(
    gpu: torch.device, seed: int, whole: bool
) -> None:
    draw = random.Random(f"{seed}, {whole}")
    generator = torch.Generator().manual_seed(seed)
    name = draw.choice(list(WHOLE if whole else ELEMENTWISE))
    dtype = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    compact = "Compact" in name
    if compact and dtype == torch.float64:  # which it is not for
        dtype = torch.bfloat16
    options = dict((WHOLE if whole else ELEMENTWISE)[name])
    if dtype in HALF and "8bit" not in name and not compact:
        options[
            draw.choice(["master_weights", "fp32_state", "stochastic_rounding"])
        ] = True
    shapes = draw.sample(SHAPES[:-1] if not whole else [(3, 5), (9, 4)], 2)
    shapes += [(65, 70)] if draw.random() < 0.3 else []
    if whole:
        shapes = [s for s in shapes if len(s) == 2]
    host = parameters(generator, dtype, shapes)
    if not whole and name != "AdEMAMix8bit":  # which needs C order
        host[0].data = transposed(host[0].data)
    device = [nn.Parameter(p.detach().to(gpu)) for p in host]
    pair = [made(name, host, options), made(name, device, options)]
    exact = not whole
    for step in range(4):
        given = drawn_step(draw, exact)
        grads = [torch.randn(p.shape, generator=generator).to(dtype) for p in host]
        if draw.random() < 0.2:
            grads[0].fill_(float("inf"))
            given["nonfinite"] = "skip"
        missing = draw.choice([None, len(grads) - 1]) if len(grads) > 1 else None
        for params, optimizer in zip((host, device), pair, strict=True):
            for k, (param, grad) in enumerate(zip(params, grads, strict=True)):
                moved = grad.to(param.device, copy=True)
                moved = moved if param.is_contiguous() else transposed(moved)
                param.grad = None if k == missing else moved
            optimizer.step(**given)
        assert pair[0]._engine.updated == pair[1]._engine.updated
        expected, found = on_host(pair[0]), on_host(pair[1])
        assert len(expected) == len(found)
        # Five iterations of Muon's quintic multiply a product's rounding by up to its
        # first coefficient each: 3.4445 ** 5 * 2 ** -24.
        close = 1e-2 if dtype in HALF else 3e-5 if name == "Muon" else 2e-6
        limit = 0.0 if exact else close
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a, rtol=limit, atol=limit, equal_nan=True)
        if step == 1 and draw.random() < 0.5:  # each continues with the other's state
            states = [cloned(o.state_dict()) for o in pair]
            pair[0].load_state_dict(states[1])
            pair[1].load_state_dict(states[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["AdamWCompact", "LionCompact"])
def test_compact_state_has_the_same_bits(
    gpu: torch.device, name: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    host = parameters(generator, dtype, [(300, 70), (7,), (0,), (33,)])
    device = [nn.Parameter(p.detach().to(gpu)) for p in host]
    pair = [made(name, params, {"weight_decay": 0.1}) for params in (host, device)]
    for step in range(5):
        for k, param in enumerate(host):
            grad = torch.randn(param.shape, generator=generator) * 10.0 ** (-step * k)
            param.grad = grad.to(dtype)
            device[k].grad = param.grad.to(gpu)
        for optimizer in pair:
            optimizer.step(zero_grads=step % 2 == 0)
        for a, b in zip(*map(on_host, pair), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


@pytest.mark.parametrize("fp32", [False, True])
def test_an_average_on_the_device_is_that_on_the_host(
    gpu: torch.device, fp32: bool
) -> None:
    torch.manual_seed(0)
    host = Net()
    device = copy.deepcopy(host).to(gpu)
    averages = []
    for model in (host, device):
        values = tuple(model.state_dict(keep_vars=True).values())
        copies = tuple(
            v.detach().to(torch.float64 if fp32 and v.is_floating_point() else v.dtype,
                          copy=True)
            for v in values
        )  # fmt: skip
        average = _C.WeightAverage(values, copies, decay=0.75)
        for step in range(3):
            with torch.no_grad():
                for value in values:
                    value += step + 1
            assert average.update()
        averages.append([c.cpu() for c in copies])
    for a, b in zip(*averages, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(any_gpu.REAL, reason="a GPU does not tell")
def test_the_kernels_run_on_torchs_stream(gpu: torch.device) -> None:
    param = nn.Parameter(torch.ones(5, device=gpu))
    param.grad = torch.ones(5, device=gpu)
    optim.SGD([param], lr=0.5).step()
    assert emulated_torch.last_stream() == emulated_torch.torchs_stream()
    assert param.detach().cpu().tolist() == [0.5] * 5


def updated_on(device: torch.device) -> list[torch.Tensor]:
    """A parameter after an update, and its average."""
    param = nn.Parameter(torch.ones(5, device=device))
    average = torch.zeros(5, device=device)
    optimizer = optim.SGD([param], lr=0.5)
    kept = _C.WeightAverage((param,), (average,), decay=0.75)
    param.grad = torch.full((5,), 2.0, device=device)
    optimizer.step()
    assert kept.update()
    return [param.detach().cpu(), average.cpu()]


def test_kernels_are_ordered_behind_what_torch_does_on_its_current_stream(
    gpu: torch.device,
) -> None:
    expected = updated_on(torch.device("cpu"))
    with torch.Stream(gpu):
        found = updated_on(gpu)
    for there, here in zip(found, expected, strict=True):
        torch.testing.assert_close(there, here)


def test_parameters_may_be_on_another_device_than_the_current_one(
    gpu: torch.device,
) -> None:
    if any_gpu.REAL and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    expected = updated_on(torch.device("cpu"))
    assert torch.accelerator.current_device_index() == 0
    found = updated_on(torch.device(any_gpu.KIND, 1))
    assert torch.accelerator.current_device_index() == 0
    for there, here in zip(found, expected, strict=True):
        torch.testing.assert_close(there, here)


def test_tensors_on_two_devices_are_rejected_by_name(gpu: torch.device) -> None:
    here, there = (nn.Parameter(torch.ones(3, device=d)) for d in ("cpu", gpu))
    for param in (here, there):
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"\[1\]\.grad is not on cuda 0, where the"):
        optim.AdamW([there, here]).step()
    with pytest.raises(
        ValueError, match=rf"\[1\]\.grad is on device {any_gpu.KIND}:0; ex"
    ):
        optim.AdamW([here, there]).step()
    assert here.tolist() == there.detach().cpu().tolist() == [1.0] * 3


def test_a_map_of_8_bits_is_checked_on_the_device(gpu: torch.device) -> None:
    param = nn.Parameter(torch.ones(5000, device=gpu))
    optimizer = optim.AdamW8bit([param])
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = optimizer.state[param]
    state["qmap1"] = state["qmap1"].flip(0)
    with pytest.raises(ValueError, match="is not in ascending order"):
        optimizer.step()


def test_optimizers_of_a_model_there_are_ours(gpu: torch.device, tmp_path: Any) -> None:
    args = ctrainer.TrainingArguments(str(tmp_path), report_to="none")
    model = Net().to(gpu)
    cls, _ = ctrainer.Trainer.get_optimizer_cls_and_kwargs(args, model)
    assert cls is optim.AdamW
    model.body[0].to("cpu")
    cls, kwargs = ctrainer.Trainer.get_optimizer_cls_and_kwargs(args, model)
    assert cls is torch.optim.AdamW
    assert kwargs["fused"]


@pytest.mark.skipif(any_gpu.REAL, reason="the driver is emulated")
def test_a_driver_that_is_too_old_is_told_and_torch_works_alone() -> None:
    done = run_alone("old_driver")
    assert "RuntimeWarning: NVIDIA's driver is for CUDA 12.8, and" in done.stderr
    assert "update the driver to 580" in done.stderr
    assert done.stdout == "kernels: False\n", done.stderr


@pytest.mark.skipif(any_gpu.REAL, reason="memory runs out by the emulation's order")
@pytest.mark.parametrize("frees", [True, False])
def test_torch_is_asked_for_memory_that_it_keeps(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, frees: bool
) -> None:
    asked = []

    def empty_cache() -> None:
        asked.append(True)
        if not frees:
            emulated_torch.fail_allocation()

    monkeypatch.setattr(torch.accelerator, "empty_cache", empty_cache)
    pair = [torch.ones(300, device=d, requires_grad=True) for d in ("cpu", gpu)]
    for x in pair:
        x.grad = torch.full_like(x, 0.5)
    host, there = (optim.AdamW([x], lr=0.1) for x in pair)
    host.step()
    emulated_torch.fail_allocation()
    if not frees:
        with pytest.raises(RuntimeError, match="out of memory"):
            there.step()
    else:
        there.step()
        any_gpu.assert_same(pair[1].detach(), pair[0].detach())
    assert asked == [True]
