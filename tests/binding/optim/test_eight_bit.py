"""8-bit state against its formula in NumPy and against bitsandbytes."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from ctrainer import optim
from ctrainer.optim._eight_bit import dynamic_map

CLASSES = (optim.AdamW8bit, optim.Adam8bit, optim.Lion8bit, optim.AdEMAMix8bit)
SHAPES = ((64, 100), (70,), (5, 999))  # the second one is too small for codes


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def give_grads(seed: int, *lists: list[Parameter]) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape, generator=generator)
        for param in same:
            param.grad = grad.to(param.dtype, copy=True)


def state_of(optimizer: Any, param: Parameter) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[param]
    return state


def same_state(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k]
        for k, v in a.items()
    )


# ---- the formula in float64 ---------------------------------------------------------


def numbers(state: dict[str, Any], i: int) -> Any:
    """What codes and scales stand for, of shape (arrays, elements)."""
    codes = state[f"state{i}"].numpy()
    absmax = np.atleast_2d(state[f"absmax{i}"].numpy())
    values = state[f"qmap{i}"].numpy()[codes].reshape(len(absmax), -1)
    scales = absmax.repeat(256, axis=1)[:, : values.shape[1]]
    return (values * scales).astype(np.float64)  # a product of two floats, rounded


def check_quantized(state: dict[str, Any], i: int, expected: Any) -> None:
    """Each code is the nearest, as far as float32 can tell: the numbers come from some
    additions and products, and the scale is the largest of its block. 1e-5 of that
    covers them many times, and is below half of the finest step of a map, 7e-3, in all
    but the few codes that it decides."""
    codes = state[f"state{i}"].numpy().reshape(expected.shape)
    absmax = np.atleast_2d(state[f"absmax{i}"].numpy())
    table = state[f"qmap{i}"].numpy().astype(np.float64)
    for row in range(len(expected)):
        for block, scale in enumerate(absmax[row]):
            part = slice(256 * block, 256 * block + 256)
            value = expected[row, part]
            assert np.isclose(scale, np.abs(value).max(), rtol=1e-5)
            gaps = np.abs(value[:, None] / scale - table)
            taken = gaps[np.arange(len(value)), codes[row, part]]
            assert (taken <= gaps.min(axis=1) + 1e-5).all()


def adam(p: Any, g: Any, m: Any, v: Any, t: int, group: dict[str, Any]) -> Any:
    (b1, b2), lr = group["betas"], group["lr"]
    m[0] = b1 * m[0] + (1 - b1) * g
    v[0] = b2 * v[0] + (1 - b2) * g * g
    denom = np.sqrt(v[0] / (1 - b2**t)) + group["eps"]
    return p * (1 - lr * group["weight_decay"]) - lr * m[0] / (1 - b1**t) / denom


def lion(p: Any, g: Any, m: Any, v: Any, t: int, group: dict[str, Any]) -> Any:
    (b1, b2), lr = group["betas"], group["lr"]
    moved = np.sign(b1 * m[0] + (1 - b1) * g)
    m[0] = b2 * m[0] + (1 - b2) * g
    return p * (1 - lr * group["weight_decay"]) - lr * moved


def ademamix(p: Any, g: Any, m: Any, v: Any, t: int, group: dict[str, Any]) -> Any:
    (b1, b2, b3), lr = group["betas"], group["lr"]
    m[0] = b1 * m[0] + (1 - b1) * g
    m[1] = b3 * m[1] + (1 - b3) * g
    v[0] = b2 * v[0] + (1 - b2) * g * g
    fast = m[0] / (1 - b1**t) + group["alpha"] * m[1]
    step = fast / (np.sqrt(v[0] / (1 - b2**t)) + group["eps"])
    return p - lr * (step + group["weight_decay"] * p)


FORMULAS = {
    optim.AdamW8bit: adam,
    optim.Adam8bit: adam,
    optim.Lion8bit: lion,
    optim.AdEMAMix8bit: ademamix,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", CLASSES)
def test_every_step_is_that_of_the_formula(cls: Any, dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    optimizer = cls(params, lr=0.01, weight_decay=0.1)
    bound = 1e-6 if dtype == torch.float32 else 2.0**-8  # half a last bit, relative
    for t in range(1, 13):
        give_grads(t, params)
        before = [p.detach().double().numpy().ravel() for p in params]
        states = [copy.deepcopy(state_of(optimizer, p)) for p in params]
        optimizer.step()
        for param, old, state in zip(params, before, states, strict=True):
            now = state_of(optimizer, param)
            if "qmap1" not in now:
                continue
            m, v = (
                numbers(state, i) if f"state{i}" in state else np.zeros((2, old.size))
                for i in (1, 2)
            )
            grad = param.grad.double().numpy().ravel()  # type: ignore[union-attr]
            group = optimizer.param_groups[0]
            expected = FORMULAS[cls](old, grad, m, v, t, group)
            got = param.detach().double().numpy().ravel()
            np.testing.assert_allclose(got, expected, rtol=bound, atol=1e-6)
            if t > 1:
                check_quantized(now, 1, m)
            if t > 1 and "state2" in now:
                check_quantized(now, 2, v)
            assert now["step"] == t


def test_maps_have_seven_decades_of_parts_that_double() -> None:
    for signed in (True, False):
        table = dynamic_map(signed).double().numpy()
        positive = table[table > 0]
        assert len(table) == 256
        assert (np.diff(table) > 0).all()
        assert table[-1] == 1.0
        assert (table < 0).sum() == (127 if signed else 0)
        assert (table == 0).sum() == 1
        for decade in range(7):
            top = 10.0 ** (decade - 6)
            parts = 2 ** (decade + (0 if signed else 1))
            middles = top * (0.1 + 0.9 * (np.arange(parts) + 0.5) / parts)
            found = positive[(positive > top / 10) & (positive < top)]
            np.testing.assert_allclose(found, middles, rtol=1e-6)


# ---- bitsandbytes -------------------------------------------------------------------


@pytest.fixture(scope="module")
def bnb() -> Any:
    return pytest.importorskip("bitsandbytes")


def test_maps_are_those_of_bitsandbytes(bnb: Any) -> None:
    for signed in (True, False):
        expected = bnb.functional.create_dynamic_map(signed=signed)
        assert torch.equal(dynamic_map(signed), expected)


# Its kernel for the CPU takes a neighbour of the nearest number for up to 3 elements in
# 100, where that is nearly as near; ours does not, as check_quantized() shows. No two
# neighbours of a map are further apart than 0.9 / 64 of the scale.
@pytest.mark.parametrize("cls", CLASSES)
def test_steps_are_those_of_bitsandbytes(cls: Any, bnb: Any) -> None:
    ours, theirs = parameters(), parameters()
    a = cls(ours, lr=0.01, weight_decay=0.1)
    b = getattr(bnb.optim, cls.__name__)(theirs, lr=0.01, weight_decay=0.1)
    for t in range(10):
        give_grads(t, ours, theirs)
        a.step()
        b.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
            mine, other = state_of(a, p), state_of(b, q)
            assert mine.keys() == other.keys()
            assert mine["step"] == other["step"]
            for name in mine.keys() - {"step"}:
                x, y = mine[name], other[name]
                assert x.shape == y.shape
                assert x.dtype == y.dtype
                if x.dtype == torch.uint8:
                    table = dynamic_map(signed=name == "state1")
                    assert (x != y).double().mean() < 0.05
                    assert (table[x.int()] - table[y.int()]).abs().max() < 0.0142
                else:
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
        b.load_state_dict(copy.deepcopy(a.state_dict()))  # differences do not add up
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                q.copy_(p)


@pytest.mark.parametrize("cls", CLASSES)
def test_their_state_loads_here(cls: Any, bnb: Any) -> None:
    ours, theirs = parameters(), parameters()
    a, b = cls(ours, lr=0.01), getattr(bnb.optim, cls.__name__)(theirs, lr=0.01)
    give_grads(0, ours, theirs)
    b.step()
    a.load_state_dict(b.state_dict())
    for p, q in zip(ours, theirs, strict=True):
        assert same_state(state_of(a, p), dict(state_of(b, q)))
    give_grads(1, ours)
    a.step()
    assert state_of(a, ours[0])["step"] == 2


# ---- what is kept, and loaded -------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_goes_on_from_its_state_dict(cls: Any, dtype: torch.dtype) -> None:
    whole, resumed = parameters(dtype=dtype), parameters(dtype=dtype)
    a, b = cls(whole), cls(resumed)
    for t in range(3):
        give_grads(t, whole)
        a.step()
    saved = pickle.loads(pickle.dumps(a.state_dict()))
    with torch.no_grad():
        for p, q in zip(whole, resumed, strict=True):
            q.copy_(p)
    b.load_state_dict(saved)
    for t in range(3, 6):
        give_grads(t, whole, resumed)
        a.step()
        b.step()
    for p, q in zip(whole, resumed, strict=True):
        assert torch.equal(p, q)
        assert same_state(state_of(a, p), state_of(b, q))


def test_what_newer_releases_wrap_is_unwrapped() -> None:
    params = parameters()
    a, b = optim.AdamW8bit(params), optim.AdamW8bit(params)
    give_grads(0, params)
    a.step()
    saved = a.state_dict()
    coded = {k: v for k, v in saved["state"][0].items() if k != "step"}
    saved["state"][0] = {"step": 1, "__bnb_optimizer_quant_state__": coded}
    b.load_state_dict(saved)
    assert same_state(state_of(a, params[0]), state_of(b, params[0]))


@pytest.mark.parametrize(
    ("cls", "wide"),
    [
        (optim.AdamW8bit, optim.AdamW),
        (optim.Lion8bit, optim.Lion),
        (optim.AdEMAMix8bit, optim.AdEMAMix),
    ],
)
def test_optim_bits_of_32_is_the_optimizer_without_codes(cls: Any, wide: Any) -> None:
    ours, theirs = parameters(), parameters()
    a, b = cls(ours, optim_bits=32), wide(theirs)
    for t in range(4):
        give_grads(t, ours, theirs)
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_state_is_a_quarter_of_adamws() -> None:
    param = Parameter(torch.zeros(256, 256))
    param.grad = torch.ones_like(param)
    optimizer = optim.AdamW8bit([param])
    optimizer.step()
    state = state_of(optimizer, param)
    names = ("state1", "state2", "absmax1", "absmax2")  # the maps are shared by all
    blocks = param.numel() // 256
    assert sum(state[n].nbytes for n in names) == 2 * param.numel() + 2 * 4 * blocks
    other = Parameter(torch.zeros(64, 64))
    assert optimizer._new_state(other, {})["qmap1"] is state["qmap1"]


def test_small_and_chosen_parameters_and_groups_keep_float32() -> None:
    a, b, c, d = (Parameter(torch.ones(n)) for n in (4095, 4096, 5000, 5000))
    groups = [{"params": [a, b, c]}, {"params": [d], "optim_bits": 32}]
    optimizer = optim.AdamW8bit(groups, keep_32bit=[c])
    for p in (a, b, c, d):
        p.grad = torch.ones_like(p)
    optimizer.step()
    kinds = [state_of(optimizer, p)["state1"].dtype for p in (a, b, c, d)]
    assert kinds == [torch.float32, torch.uint8, torch.float32, torch.float32]


def test_copies_keep_float32_where_the_optimizer_does() -> None:
    params = [Parameter(torch.ones(5000)) for _ in range(2)]
    optimizer = optim.AdamW8bit(params, keep_32bit=[params[1]])
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        inner = made.param_groups[0]["params"]
        for p in inner:
            p.grad = torch.ones_like(p)
        made.step()
        kinds = [state_of(made, p)["state1"].dtype for p in inner]
        assert kinds == [torch.uint8, torch.float32]


def test_master_weights_have_state_of_8_bits_and_float32_where_it_is_kept() -> None:
    params = parameters(dtype=torch.bfloat16)
    optimizer = optim.AdamW8bit(params, master_weights=True, keep_32bit=[params[2]])
    wide = [Parameter(p.detach().float()) for p in params]
    expected = optim.AdamW8bit(wide, keep_32bit=[wide[2]])
    for t in range(4):
        give_grads(t, params)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        expected.step()
    for p, q in zip(params, wide, strict=True):
        assert torch.equal(state_of(optimizer, p)["master_param"], q)
        assert torch.equal(p, q.bfloat16())
    kinds = [state_of(optimizer, p)["state1"].dtype for p in params]
    assert kinds == [torch.uint8, torch.float32, torch.float32]


def test_parameters_of_float64_are_computed_in_float64() -> None:
    param = Parameter(torch.linspace(1, 2, 5000, dtype=torch.float64))
    start = param.detach().clone()
    param.grad = torch.full_like(param, 0.5)
    optim.AdamW8bit([param], lr=1e-12, weight_decay=0.0).step()
    moved = start - param.detach()
    assert torch.allclose(moved, torch.tensor(1e-12, dtype=torch.float64), rtol=1e-3)


def test_a_gradient_that_is_not_finite_shows_in_its_block() -> None:
    param = Parameter(torch.zeros(5000))
    param.grad = torch.ones(5000)
    param.grad[300] = float("inf")
    optimizer = optim.AdamW8bit([param])
    optimizer.step()
    scales = state_of(optimizer, param)["absmax1"]
    assert scales.isnan().nonzero().flatten().tolist() == [1]


def test_a_transposed_parameter_is_taken_in_the_order_of_memory() -> None:
    base = torch.randn(70, 80, generator=torch.Generator().manual_seed(1))
    a, b = Parameter(base.clone()), Parameter(base.t().contiguous().t())
    a.grad, b.grad = base.t().contiguous().t().clone(), base.t().contiguous().t()
    a.grad = a.grad.contiguous()
    one, other = optim.Lion8bit([a]), optim.Lion8bit([b])
    one.step()
    other.step()
    assert torch.equal(a, b)


# ---- what is rejected ----------------------------------------------------------------


def test_options_out_of_range_are_named() -> None:
    params = parameters()
    give_grads(0, params)
    with pytest.raises(ValueError, match="optim_bits is 4; expected 8 or 32"):
        optim.AdamW8bit(params, optim_bits=4).step()
    groups = [{"params": params, "fp32_state": True}]
    with pytest.raises(ValueError, match="fp32_state=True with 8-bit state"):
        optim.AdamW8bit(groups).step()
    with pytest.raises(ValueError, match=r"'amsgrad'\] is True"):
        optim.AdamW8bit([{"params": params, "amsgrad": True}]).step()
    transposed = Parameter(torch.ones(70, 80).t())
    transposed.grad = torch.ones(70, 80).t()
    with pytest.raises(ValueError, match="both in C order"):
        optim.AdEMAMix8bit([transposed]).step()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("absmax1", torch.zeros(24), "'absmax1' has 24 elements of .*; expected 25"),
        ("absmax2", torch.zeros(25).double(), "elements of float64; expected 25"),
        ("qmap1", torch.zeros(16), "'qmap1' has 16 elements of float32; expected 256"),
        ("qmap2", torch.arange(256.0).flip(0), "'qmap2' is not in ascending order"),
        ("qmap2", torch.full((256,), float("nan")), "not in ascending order"),
        ("state2", torch.zeros(64, 100), "'state2' is float32; expected uint8, as"),
        ("state1", torch.zeros(9, dtype=torch.uint8), "'state1' is uint8"),
    ],
)
def test_state_that_does_not_fit_is_named(
    name: str, value: torch.Tensor, message: str
) -> None:
    params = parameters()
    optimizer = optim.AdamW8bit(params)
    give_grads(0, params)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    state_of(optimizer, params[0])[name] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_codes_without_their_scales_are_rejected() -> None:
    params = parameters()
    optimizer = optim.AdamW8bit(params)
    give_grads(0, params)
    optimizer.step()
    del state_of(optimizer, params[0])["absmax2"]
    with pytest.raises(ValueError, match="has no 'absmax2'"):
        optimizer.step()
