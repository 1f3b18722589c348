"""LAMB and LARS against their papers, written in NumPy, in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ctrainer import optim

SHAPES = [(7,), (5, 9), (3, 4, 6), (70, 130), (1,), ()]
STEPS = 60


class Run:
    """The same parameters and gradients for an optimizer and for an oracle."""

    def __init__(self, dtype: torch.dtype, zeros: bool = False) -> None:
        self.random = torch.Generator().manual_seed(5)
        make = torch.zeros if zeros else self.normal
        self.params = [torch.nn.Parameter(make(s, dtype=dtype)) for s in SHAPES]

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, generator=self.random)

    def arrays(self) -> list[np.ndarray]:
        return [p.detach().double().numpy().copy() for p in self.params]

    def new_grads(self) -> list[np.ndarray]:
        for p in self.params:
            p.grad = self.normal(tuple(p.shape), p.dtype)
        return [p.grad.double().numpy() for p in self.params if p.grad is not None]

    def distance(self, expected: list[np.ndarray]) -> float:
        """The largest difference, in units of each parameter's largest element."""
        pairs = zip(self.arrays(), expected, strict=True)
        return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


def norm(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).sum()))


class LambOracle:
    """Algorithm 2 of the paper, with apex's documented options."""

    def __init__(self, params: list[np.ndarray], **options: Any) -> None:
        self.params, self.t = params, 0
        self.o = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "bias_correction": True,
            "grad_averaging": True,
            "adam_w_mode": True,
            "use_nvlamb": False,
            **options,
        }
        self.m = [np.zeros_like(p) for p in params]
        self.v = [np.zeros_like(p) for p in params]

    def step(self, grads: list[np.ndarray]) -> None:
        o, self.t = self.o, self.t + 1
        b1, b2 = o["betas"]
        whole = np.sqrt(sum(norm(g) ** 2 for g in grads))
        clip = max(1.0, whole / o["max_grad_norm"]) if o["max_grad_norm"] > 0 else 1.0
        for i, raw in enumerate(grads):
            p, g = self.params[i], raw / clip
            if not o["adam_w_mode"]:
                g = g + o["weight_decay"] * p
            share = 1 - b1 if o["grad_averaging"] else 1.0
            self.m[i] = b1 * self.m[i] + share * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * g**2
            m, v = self.m[i], self.v[i]
            if o["bias_correction"]:
                m, v = m / (1 - b1**self.t), v / (1 - b2**self.t)
            u = m / (np.sqrt(v) + o["eps"])
            if o["adam_w_mode"]:
                u = u + o["weight_decay"] * p
            trusted = o["use_nvlamb"] or o["weight_decay"] != 0
            known = norm(p) > 0 and norm(u) > 0
            ratio = norm(p) / norm(u) if trusted and known else 1.0
            self.params[i] = p - o["lr"] * ratio * u


class LarsOracle:
    """Algorithm 1 of the paper over SGD, and the clipping of apex's LARC."""

    def __init__(self, params: list[np.ndarray], **options: Any) -> None:
        self.params = params
        self.o = {
            "lr": 1e-3,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "trust_coefficient": 0.001,
            "eps": 1e-8,
            "clip": False,
            **options,
        }
        self.buffers: list[Any] = [None] * len(params)

    def scaled(self, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        o = self.o
        if o["trust_coefficient"] == 0:
            return g + o["weight_decay"] * p
        if norm(p) == 0 or norm(g) == 0:
            return g
        bottom = norm(g) + o["weight_decay"] * norm(p) + o["eps"]
        rate = o["trust_coefficient"] * norm(p) / bottom
        rate = min(rate / o["lr"], 1.0) if o["clip"] else rate
        return rate * (g + o["weight_decay"] * p)

    def step(self, grads: list[np.ndarray]) -> None:
        o = self.o
        for i, raw in enumerate(grads):
            g = self.scaled(self.params[i], raw)
            if o["momentum"]:
                old = self.buffers[i]
                new = (1 - o["dampening"]) * g
                b = g if old is None else o["momentum"] * old + new
                self.buffers[i] = b
                g = g + o["momentum"] * b if o["nesterov"] else b
            self.params[i] = self.params[i] - o["lr"] * g


LAMB_OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.0, "lr": 0.01},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True},
    {"adam_w_mode": False, "weight_decay": 0.1},
    {"bias_correction": False, "grad_averaging": False, "betas": (0.8, 0.95)},
]
LARS_OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "trust_coefficient": 0.02},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "clip": True, "weight_decay": 0.1},
    {"lr": 0.1, "trust_coefficient": 0.0, "weight_decay": 0.1},
]
CASES = [(optim.LAMB, LambOracle, o) for o in LAMB_OPTIONS]
CASES += [(optim.LARS, LarsOracle, o) for o in LARS_OPTIONS]  # type: ignore[list-item]


@pytest.mark.parametrize(("cls", "oracle", "options"), CASES)
@pytest.mark.parametrize("zeros", [False, True])
def test_float64_equals_the_paper(
    cls: Callable[..., Any], oracle: Callable[..., Any], options: Any, zeros: bool
) -> None:
    run = Run(torch.float64, zeros)
    ours, theirs = cls(run.params, **options), oracle(run.arrays(), **options)
    for _ in range(STEPS):
        theirs.step(run.new_grads())
        ours.step()
    # Some ten roundings a step, of which the moments remember ten steps or a hundred.
    assert run.distance(theirs.params) < STEPS * 1000 * 2.0**-53


@pytest.mark.parametrize(("cls", "oracle", "options"), CASES)
def test_float32_equals_the_paper_to_float32(
    cls: Callable[..., Any], oracle: Callable[..., Any], options: Any
) -> None:
    run = Run(torch.float32)
    ours, theirs = cls(run.params, **options), oracle(run.arrays(), **options)
    for _ in range(STEPS):
        theirs.step(run.new_grads())
        ours.step()
    assert run.distance(theirs.params) < STEPS * 10 * 2.0**-24


def test_maximize_steps_the_other_way() -> None:
    for cls in (optim.LAMB, optim.LARS):
        up, down = Run(torch.float64), Run(torch.float64)
        a, b = cls(up.params, maximize=True), cls(down.params)
        for _ in range(3):
            up.new_grads()
            down.new_grads()
            for p in down.params:
                p.grad = None if p.grad is None else -p.grad
            a.step()
            b.step()
        assert all(map(torch.equal, up.params, down.params))


@pytest.mark.parametrize("cls", [optim.LAMB, optim.LARS])
def test_a_run_goes_on_from_its_state_dict(cls: Callable[..., Any]) -> None:
    options = {"lr": 0.01, "weight_decay": 0.1}
    if cls is optim.LARS:
        options["momentum"] = 0.9
    whole, split = Run(torch.float32), Run(torch.float32)
    one, other = cls(whole.params, **options), cls(split.params, **options)
    for step in range(6):
        if step == 3:
            saved = other.state_dict()
            other = cls(split.params)
            other.load_state_dict(saved)
        whole.new_grads()
        split.new_grads()
        one.step()
        other.step()
    assert all(map(torch.equal, whole.params, split.params))


def test_options_are_read_from_the_live_groups() -> None:
    run = Run(torch.float64)
    ours = optim.LAMB(
        [{"params": run.params[:3]}, {"params": run.params[3:], "lr": 0.0}]
    )
    before = run.arrays()
    run.new_grads()
    ours.step()
    after = run.arrays()
    assert all((a != b).all() for a, b in zip(before[:3], after[:3], strict=True))
    assert all((a == b).all() for a, b in zip(before[3:], after[3:], strict=True))
    ours.param_groups[1]["lr"] = 0.1
    ours.step()
    assert all((a != b).all() for a, b in zip(after, run.arrays(), strict=True))


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (optim.LAMB, {"betas": (1.0, 0.9)}, r"betas\[0\] must be in \[0, 1\), got 1"),
        (optim.LAMB, {"max_grad_norm": -1.0}, r"'max_grad_norm'\] is -1"),
        (optim.LARS, {"nesterov": True}, "nesterov needs momentum > 0 and dampening 0"),
        (
            optim.LARS,
            {"lr": 0.0, "clip": True},
            "which clip divides by, must be > 0",
        ),
        (optim.LARS, {"trust_coefficient": float("nan")}, "trust_coefficient must be"),
    ],
)
def test_an_option_out_of_range_is_named_and_changes_nothing(
    cls: Callable[..., Any], options: Any, message: str
) -> None:
    run = Run(torch.float32)
    before = run.arrays()
    ours = cls(run.params, **options)
    run.new_grads()
    with pytest.raises(ValueError, match=message):
        ours.step()
    assert all((a == b).all() for a, b in zip(before, run.arrays(), strict=True))


def test_sparse_gradients_are_rejected() -> None:
    p = torch.nn.Parameter(torch.zeros(4, 3))
    p.grad = torch.ones(4, 3).to_sparse()
    for cls in (optim.LAMB, optim.LARS, optim.Adafactor, optim.Muon):
        with pytest.raises((TypeError, ValueError), match="sparse"):
            cls([p]).step()


def test_bfloat16_follows_float32_with_master_weights() -> None:
    for cls in (optim.LAMB, optim.LARS):
        wide, narrow = Run(torch.float32), Run(torch.bfloat16)
        for a, b in zip(wide.params, narrow.params, strict=True):
            a.data.copy_(b.data)
        one = cls(wide.params, lr=0.01)
        other = cls(narrow.params, lr=0.01, master_weights=True)
        for _ in range(5):
            narrow.new_grads()
            for a, b in zip(wide.params, narrow.params, strict=True):
                a.grad = None if b.grad is None else b.grad.float()
            one.step()
            other.step()
        for a, b in zip(wide.params, narrow.params, strict=True):
            assert torch.equal(a.bfloat16(), b)
