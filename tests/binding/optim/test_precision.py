"""Master weights, float32 state and stochastic rounding of 16-bit parameters."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from ctrainer import optim

HALVES = [torch.bfloat16, torch.float16]
OPTIMIZERS: list[tuple[type[Any], dict[str, Any]]] = [
    (optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 1e-2}),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
]


def make_params(dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(40, 30), (7,), (3, 2, 2)]
    return [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_grads(params: list[Parameter], step: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype).to(p.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_master_weights_are_a_float32_run_and_the_model_is_that_rounded(
    cls: type[Any], options: dict[str, Any], dtype: torch.dtype
) -> None:
    half = make_params(dtype)
    full = [Parameter(p.detach().float()) for p in half]
    opt = cls(half, master_weights=True, **options)
    ref = cls(full, **options)
    for step in range(50):
        set_grads(half, step, dtype)
        set_grads(full, step, dtype)
        opt.step()
        ref.step()
    for h, f in zip(half, full, strict=True):
        assert torch.equal(opt.state[h]["master_param"], f)
        assert torch.equal(h, f.to(dtype))
        for name, value in ref.state[f].items():
            assert torch.equal(opt.state[h][name], value), name


@pytest.mark.parametrize("dtype", HALVES)
def test_small_updates_are_lost_without_master_weights_and_kept_with_them(
    dtype: torch.dtype,
) -> None:
    ends = []
    for master in (False, True):
        p = Parameter(torch.ones(8, dtype=dtype))
        opt = optim.SGD([p], lr=1e-5, master_weights=master)
        for _ in range(2000):
            p.grad = torch.ones_like(p)
            opt.step()
        ends.append(p[0].item())
    assert ends[0] == 1.0
    assert ends[1] == pytest.approx(0.98, abs=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_state_is_float32_and_the_parameter_is_rounded_at_each_step(
    dtype: torch.dtype,
) -> None:
    half = make_params(dtype)
    opt = optim.AdamW(half, lr=1e-3, fp32_state=True)
    mirror = [p.detach().float() for p in half]
    full = [Parameter(m) for m in mirror]
    ref = optim.AdamW(full, lr=1e-3)
    for step in range(20):
        set_grads(half, step, dtype)
        set_grads(full, step, dtype)
        opt.step()
        ref.step()
        for f in full:
            f.data.copy_(f.data.to(dtype).float())
    for h, f in zip(half, full, strict=True):
        assert "master_param" not in opt.state[h]
        assert opt.state[h]["exp_avg"].dtype == torch.float32
        assert torch.equal(opt.state[h]["exp_avg_sq"], ref.state[f]["exp_avg_sq"])
        assert torch.equal(h.float(), f)


@pytest.mark.parametrize(
    "precision",
    [{"master_weights": True}, {"fp32_state": True}, {"stochastic_rounding": True}],
)
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_a_run_resumed_from_state_dict_is_bit_identical(
    cls: type[Any], options: dict[str, Any], precision: dict[str, Any]
) -> None:
    straight = make_params(torch.bfloat16)
    opt = cls(straight, **options, **precision)
    for step in range(10):
        set_grads(straight, step, torch.bfloat16)
        opt.step()
        if step == 4:
            saved = [p.detach().clone() for p in straight]
            state = copy.deepcopy(opt.state_dict())
    resumed = [Parameter(p) for p in saved]
    again = cls(resumed, **options, **precision)
    again.load_state_dict(state)
    for step in range(5, 10):
        set_grads(resumed, step, torch.bfloat16)
        again.step()
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
        for name, value in opt.state[a].items():
            assert torch.equal(again.state[b][name], value), name
            assert again.state[b][name].dtype == value.dtype


def test_options_survive_a_state_dict_that_lacks_them() -> None:
    plain = make_params(torch.bfloat16)
    old = optim.AdamW(plain)
    set_grads(plain, 0, torch.bfloat16)
    old.step()
    params = [Parameter(p.detach().clone()) for p in plain]
    opt = optim.AdamW(params, master_weights=True)
    opt.load_state_dict(old.state_dict())
    assert opt.param_groups[0]["master_weights"] is True
    set_grads(params, 1, torch.bfloat16)
    opt.step()
    master = opt.state[params[0]]["master_param"]
    assert master.dtype == torch.float32
    assert torch.equal(params[0], master.to(torch.bfloat16))
    assert opt.state[params[0]]["step"] == 2


def test_groups_may_differ_and_float32_parameters_are_left_as_they_are() -> None:
    half, full = make_params(torch.bfloat16), make_params(torch.float32)
    opt = optim.AdamW(
        [{"params": half[:1], "master_weights": True}, {"params": [*half[1:], *full]}]
    )
    for params in (half, full):
        set_grads(params, 0, torch.bfloat16)
    opt.step()
    assert "master_param" in opt.state[half[0]]
    assert not any("master_param" in opt.state[p] for p in [*half[1:], *full])
    opt.param_groups[1]["master_weights"] = True  # live, as every option
    for params in (half, full):
        set_grads(params, 1, torch.bfloat16)
    opt.step()
    assert all("master_param" in opt.state[p] for p in half)
    assert not any("master_param" in opt.state[p] for p in full)


def test_sync_master_weights_takes_the_parameters() -> None:
    params = make_params(torch.bfloat16)
    opt = optim.SGD(params, lr=0.1, master_weights=True)
    set_grads(params, 0, torch.bfloat16)
    opt.step()
    with torch.no_grad():
        params[0].fill_(3.0)
    opt.sync_master_weights()
    assert torch.equal(opt.state[params[0]]["master_param"], params[0].float())


@pytest.mark.parametrize("key", ["exp_avg", "master_param"])
def test_state_of_the_wrong_kind_is_named(key: str) -> None:
    params = make_params(torch.bfloat16)
    opt = optim.AdamW(params, master_weights=True)
    set_grads(params, 0, torch.bfloat16)
    opt.step()
    opt.state[params[1]][key] = torch.zeros(7, dtype=torch.float64)
    before = params[0].detach().clone()
    set_grads(params, 1, torch.bfloat16)
    with pytest.raises(ValueError, match=rf"\['params'\]\[1\] state '{key}'.*float64"):
        opt.step()
    assert torch.equal(params[0], before)


class TestStochasticRounding:
    def run(self, seed: int, steps: int = 1, n: int = 4096) -> torch.Tensor:
        p = Parameter(torch.ones(n, dtype=torch.bfloat16))
        opt = optim.SGD([p], lr=2.0**-10, stochastic_rounding=True, rounding_seed=seed)
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            opt.step()
        return p.detach()

    def test_each_element_goes_to_one_of_its_two_neighbours(self) -> None:
        below = 1 - 2.0**-8  # bfloat16's next number below 1
        values = set(self.run(0).float().tolist())
        assert values == {1.0, below}

    def test_it_is_right_on_average(self) -> None:
        """1 - 2**-10 is a quarter of the way down: binomial with p = 1/4, so the share
        is within 5 standard deviations of it."""
        n = 1 << 18
        down = (self.run(3, n=n).float() < 1).float().mean().item()
        assert abs(down - 0.25) < 5 * (0.25 * 0.75 / n) ** 0.5

    def test_neighbours_and_steps_are_independent(self) -> None:
        n = 1 << 16
        first = (self.run(5, n=n).float() < 1).float() - 0.25
        second = (self.run(6, n=n).float() < 1).float() - 0.25
        for a, b in ((first[:-1], first[1:]), (first[:-8], first[8:]), (first, second)):
            correlation = (a * b).mean().item() / (0.25 * 0.75)
            assert abs(correlation) < 5 / n**0.5

    def test_the_seed_alone_decides(self) -> None:
        assert torch.equal(self.run(1, 20), self.run(1, 20))
        assert not torch.equal(self.run(1, 20), self.run(2, 20))

    def test_training_goes_where_rounding_to_nearest_stands_still(self) -> None:
        end = self.run(0, steps=64).float().mean().item()
        assert end == pytest.approx(1 - 64 * 2.0**-10, abs=2e-3)

    def test_float16_is_rejected(self) -> None:
        p = Parameter(torch.ones(3, dtype=torch.float16))
        opt = optim.SGD([p], lr=0.1, stochastic_rounding=True)
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match="bfloat16"):
            opt.step()

    @pytest.mark.parametrize("seed", [-1, 2**64, 0.5])
    def test_a_seed_out_of_range_is_named(self, seed: Any) -> None:
        p = Parameter(torch.ones(3, dtype=torch.bfloat16))
        opt = optim.SGD([p], lr=0.1, stochastic_rounding=True, rounding_seed=seed)
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=r"'rounding_seed'\] is .*whole number"):
            opt.step()
