"""Compact state against its formulas in NumPy and against AdamW in float64."""

import copy
import io
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from draws import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from ctrainer import optim

F = np.float32
CLASSES = (optim.AdamWCompact, optim.LionCompact)
PLAIN = {optim.AdamWCompact: optim.AdamW, optim.LionCompact: optim.Lion}
SHAPES = ((64, 33), (70,), (), (0,), (31,), (5, 999))
SMALLEST, LARGEST = 2.0**-24, 65504.0  # of float16
INF, NAN = float("inf"), float("nan")


def parameters(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Parameter]:
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
        v.dtype == b[k].dtype and torch.equal(v, b[k])
        if isinstance(v, torch.Tensor)
        else v == b[k]
        for k, v in a.items()
    )


# ---- the formulas in float32 ---------------------------------------------------------


def by_group(x: Any) -> Any:
    """Rows of 32 elements, zeros behind the last."""
    return np.pad(x, (0, -len(x) % 32)).reshape(-1, 32)


def decoded(state: dict[str, Any], name: str) -> Any:
    values = state[name].numpy().astype(F).ravel()
    scale = state[f"{name}_scale"].numpy().astype(F).repeat(32)[: len(values)]
    if name == "exp_avg":
        return values / (F(254) - np.abs(values)) * scale
    root = values * (scale * F(1 / 255))
    return root * root


def master(param: torch.Tensor, correction: torch.Tensor) -> Any:
    stored = param.detach().float().numpy().ravel()
    exponent = (stored.view(np.uint32) >> 23 & 0xFF).astype(int).clip(1, 254)
    half_ulp = np.ldexp(F(1), exponent - 135).astype(F)
    return stored + correction.numpy().astype(F).ravel() * F(1 / 127) * half_ulp


def scales(x: Any, down: bool) -> Any:
    """float16, to nearest or down, within the positive finite numbers but for 0."""
    most = np.abs(by_group(x)).max(axis=1)
    with np.errstate(over="ignore"):
        half = most.astype(np.float16)
    if down:
        below = np.nextafter(half, np.float16(0))
        half = np.where(half.astype(F) > most, below, half)
    half = half.clip(0, np.float16(LARGEST))
    half = np.where((half == 0) & (most != 0), np.float16(SMALLEST), half)
    return np.where(np.isfinite(most), half, np.float16(NAN))


def encoded(x: Any, name: str) -> dict[str, Any]:
    is_momentum = name == "exp_avg"
    source = x if is_momentum else np.sqrt(x)
    half = scales(source, down=is_momentum)
    scale = half.astype(F).repeat(32)[: len(x)]
    with np.errstate(all="ignore"):
        if is_momentum:
            inside = source.clip(-scale, scale)
            values = np.rint(F(254) * inside / (scale + np.abs(inside)))
        else:
            root = np.minimum(source * (F(255) / scale), F(255))
            values = np.rint(np.where((root < 1) & (x > 0), F(1), root))
    values = np.where(np.isnan(values), 0, values)
    values = values.astype(np.int8 if is_momentum else np.uint8)
    return {name: values, f"{name}_scale": half}


def correction_of(x: Any, stored: Any) -> Any:
    exponent = (stored.view(np.uint32) >> 23 & 0xFF).astype(int).clip(1, 254)
    apart = x.astype(np.float64) - stored
    return np.rint(apart / np.ldexp(1.0, exponent - 135) * 127).astype(np.int8)


def plain_step(
    cls: Any, param: Parameter, state: dict[str, Any], options: dict[str, Any]
) -> tuple[Parameter, dict[str, Any]]:
    """A step of the optimizer without quantization, in float32, from that state."""
    value = param.detach().float().numpy().ravel()
    if "error_bits" in state:
        value = master(param, state["error_bits"])
    wide = Parameter(torch.from_numpy(np.array(value, F)))
    optimizer = PLAIN[cls]([wide], **options)
    found = {
        name: torch.from_numpy(decoded(state, name))
        for name in ("exp_avg", "exp_avg_sq")
        if name in state
    }
    step = torch.tensor(float(state["step"]))
    optimizer.state[wide] = {"step": step, **found} if len(found) == 2 else found
    assert param.grad is not None
    wide.grad = param.grad.float().reshape(-1)
    optimizer.step()
    return wide, optimizer.state[wide]


def check_bits(cls: Any, params: list[Parameter], options: dict[str, Any]) -> Any:
    """One step from the state as it is: every bit is that of the formulas."""
    optimizer = cls(params, **options)
    plain = {k: v for k, v in options.items() if k != "master_weight_bits"}
    while True:
        seed = yield optimizer
        if seed is not None:
            give_grads(seed, params)
        before = [p.detach().clone() for p in params]
        states = [copy.deepcopy(state_of(optimizer, p)) for p in params]
        optimizer.step()
        for param, old, state in zip(params, before, states, strict=True):
            now = state_of(optimizer, param)
            if not state:
                continue
            held = Parameter(old)
            held.grad = param.grad
            wide, moments = plain_step(cls, held, state, plain)
            for name in moments.keys() - {"step"}:
                wanted = encoded(moments[name].numpy(), name)
                for key, value in wanted.items():
                    np.testing.assert_array_equal(now[key].numpy().ravel(), value, key)
            new = wide.detach().to(param.dtype)
            assert torch.equal(param.detach().reshape(-1), new)
            if "error_bits" in now:
                bits = correction_of(wide.detach().numpy(), new.float().numpy())
                np.testing.assert_array_equal(now["error_bits"].numpy().ravel(), bits)


@pytest.mark.parametrize("bits", [24, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cls", CLASSES)
def test_every_bit_is_that_of_the_formulas(
    cls: Any, dtype: torch.dtype, bits: int | None
) -> None:
    params = parameters(dtype=dtype)
    options = {"lr": 0.01, "weight_decay": 0.1, "master_weight_bits": bits}
    steps = check_bits(cls, params, options)
    next(steps)
    for seed in range(6):
        optimizer = steps.send(seed)
    corrected = dtype == torch.bfloat16 and bits == 24
    assert all(("error_bits" in state_of(optimizer, p)) == corrected for p in params)
    assert state_of(optimizer, params[0])["step"] == 6


@settings(max_examples=draws(60, 3000), deadline=None, derandomize=True)
@given(
    st.integers(0, 100),
    st.lists(
        st.tuples(st.integers(-30, 18), st.integers(0, 99)), min_size=2, max_size=4
    ),
    st.sampled_from(CLASSES),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
)
def test_every_bit_of_any_size_of_gradients_is_that_of_the_formulas(
    n: int, grads: list[tuple[int, int]], cls: Any, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(n)
    param = Parameter(torch.randn(n, generator=generator).to(dtype))
    bits = None if dtype == torch.float16 else 24
    steps = check_bits(cls, [param], {"lr": 1e-3, "master_weight_bits": bits})
    next(steps)
    for exponent, spread in grads:
        sizes = 10.0 ** -(torch.rand(n, generator=generator) * spread / 10)
        grad = torch.randn(n, generator=generator) * sizes * 10.0**exponent
        param.grad = grad.to(dtype)
        if not bool(param.grad.isfinite().all()):
            continue  # float16
        steps.send(None)


# ---- AdamW in float64 ---------------------------------------------------------------


def test_a_step_is_adamws_within_half_a_quantized_value() -> None:
    """A momentum's y is within 1/254, of slope 2 / (2 - |y|)**2 at most 2; the root of
    a second moment within 1/510 of its scale, or 1/255 near 0; the scale rounds by
    2**-10 at most. Parameters are within a half of 1/127 of half the spacing.
    Some roundings of float32 come to all."""
    params = parameters()
    optimizer = optim.AdamWCompact(params, lr=0.01, weight_decay=0.1)
    for seed in range(8):
        give_grads(seed, params)
        before = [
            (p.detach().clone(), copy.deepcopy(state_of(optimizer, p))) for p in params
        ]
        optimizer.step()
        for param, (old, state) in zip(params, before, strict=True):
            if not state or param.numel() == 0:
                continue
            wide = Parameter(
                torch.from_numpy(master(old, state["error_bits"])).double()
            )
            there = torch.optim.AdamW([wide], lr=0.01, weight_decay=0.1)
            names = ("exp_avg", "exp_avg_sq")
            there.state[wide] = {
                name: torch.from_numpy(decoded(state, name)).double() for name in names
            } | {"step": torch.tensor(float(state["step"]))}
            assert param.grad is not None
            wide.grad = param.grad.double().reshape(-1)
            there.step()
            now = state_of(optimizer, param)
            got = master(param, now["error_bits"]).astype(np.float64)
            expected = wide.detach().numpy()
            ulp = np.abs(param.detach().double().numpy().ravel()) * 2.0**-7
            close = ulp / 2 * 0.00395 + 1e-6 * np.abs(expected) + 1e-38
            assert (np.abs(got - expected) <= close).all()
            moments = there.state[wide]
            m, v = (moments[name].numpy() for name in names)
            most = np.abs(by_group(m)).max(axis=1).repeat(32)[: len(m)]
            assert (np.abs(decoded(now, names[0]) - m) <= most * 0.0089).all()
            root = np.sqrt(v)
            most = by_group(root).max(axis=1).repeat(32)[: len(v)]
            near = np.where(root < most / 255, 1 / 255, 1 / 510)
            off = np.abs(np.sqrt(decoded(now, names[1])) - root)
            assert (off <= most * (near + 1e-3 * root / most) + 1e-12).all()


def test_corrections_hold_what_bfloat16_cannot() -> None:
    """Steps of 1/39 of the spacing of bfloat16 numbers: rounded alone, they are
    lost. A correction is 1/254 of the spacing: a step is within 39/508."""
    params = [Parameter(torch.ones(100, dtype=torch.bfloat16)) for _ in range(2)]
    a = optim.AdamWCompact(params[:1], lr=2e-4, weight_decay=0.0)
    b = optim.AdamWCompact(
        params[1:], lr=2e-4, weight_decay=0.0, master_weight_bits=None
    )
    for _ in range(200):
        for p in params:
            p.grad = torch.full_like(p, -1.0)
        a.step()
        b.step()
    assert torch.equal(params[1], torch.ones_like(params[1]))
    got = master(params[0], state_of(a, params[0])["error_bits"])
    np.testing.assert_allclose(got - 1, 200 * 2e-4, rtol=39 / 508)


# ---- bytes --------------------------------------------------------------------------


def held(optimizer: Any, param: Parameter) -> list[torch.Tensor]:
    return [
        v for v in state_of(optimizer, param).values() if isinstance(v, torch.Tensor)
    ]


def test_an_update_moves_at_most_12_6_bytes_a_parameter() -> None:
    """The parameter and its state are read and written, the gradient is read; with
    zero_grads it is written, too. The core sees no other arrays of the parameter."""
    param = Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = optim.AdamWCompact([param])
    optimizer.step()
    state = state_of(optimizer, param)
    names = {"exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "error_bits"}
    assert state.keys() == names | {"step"}
    written = [param.detach(), *held(optimizer, param)]
    before = [t.clone() for t in written]
    pointers = [t.data_ptr() for t in written]
    param.grad = torch.randn(param.shape).bfloat16()
    optimizer.step()
    assert pointers == [t.data_ptr() for t in [param.detach(), *held(optimizer, param)]]
    assert not any(torch.equal(a, b) for a, b in zip(before, written, strict=True))
    moved = 2 * sum(t.nbytes for t in written) + param.grad.nbytes
    assert moved / param.numel() <= 12.6
    assert (moved + param.grad.nbytes) / param.numel() <= 14.6  # with zero_grads


def test_state_is_a_quarter_of_adamws_with_master_weights() -> None:
    param = Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    sizes = []
    for made in (
        optim.AdamWCompact([param]),
        optim.AdamW8bit([param], master_weights=True),
        optim.AdamW([param], master_weights=True),
    ):
        made.step()
        sizes.append(sum(t.nbytes for t in held(made, param)) / param.numel())
    assert sizes[0] == 3.125
    assert sizes[0] < sizes[1] / 1.9
    assert sizes[0] < sizes[2] / 3.8


# ---- what does not blow up ----------------------------------------------------------


@pytest.mark.parametrize("seed", range(draws(6, 200)))
def test_a_variance_that_is_small_in_its_group_is_no_division_by_eps(seed: int) -> None:
    """Adam moves by 7.3 * lr at most with these betas. The momentum is at most half a
    value, 1/506 of its scale, too far, and the root not below 1/255 of its own, which
    is at least the momentum's scale / 7.3: by 3.7 * lr more."""
    draw = np.random.default_rng(seed)
    param = Parameter(torch.zeros(320))
    optimizer = optim.AdamWCompact([param], lr=1.0, weight_decay=0.0)
    for step in range(60):
        sizes = 10.0 ** draw.uniform(-9, 3, (10, 32))
        grads = draw.standard_normal((10, 32)) * sizes
        grads *= draw.random((10, 32)) < (1.0 if step < 30 else 0.1)
        param.grad = torch.from_numpy(grads.astype(F).ravel())
        before = param.detach().clone()
        optimizer.step()
        assert (param.detach() - before).abs().max() < 11.1
    state = state_of(optimizer, param)
    tiny = (state["exp_avg_sq"] == 0) & (state["exp_avg"] != 0)
    assert not bool(tiny.any())


def test_gradients_of_zero_let_the_moments_decay() -> None:
    param = Parameter(torch.zeros(3200, dtype=torch.bfloat16))
    optimizer = optim.AdamWCompact([param], lr=1e-3, weight_decay=0.0)
    for seed in range(20):
        give_grads(seed, [param])
        optimizer.step()
    state = state_of(optimizer, param)
    largest = state["exp_avg_sq_scale"].max().item()
    param.grad = torch.zeros_like(param)
    for _ in range(400):
        optimizer.step()
    at_rest = master(param, state["error_bits"])
    # float16 is twice as fine at the end of a power of two as at its beginning
    assert state["exp_avg_sq_scale"].max().item() < largest * 0.9
    assert state["exp_avg_scale"].max().item() == SMALLEST
    for _ in range(1000):
        optimizer.step()
    moved = np.abs(master(param, state["error_bits"]) - at_rest).max()
    assert moved < 1e-3 * 1e-3 * 1000  # a thousandth of lr each
    assert all(bool(t.float().isfinite().all()) for t in held(optimizer, param))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_gradient_that_is_not_finite_shows_in_its_group(bad: float) -> None:
    param = Parameter(torch.zeros(5000, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    param.grad[300] = bad
    optimizer = optim.AdamWCompact([param])
    optimizer.step()
    state = state_of(optimizer, param)
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        assert state[name].isnan().nonzero().flatten().tolist() == [300 // 32]
    assert param.detach().isnan().nonzero().flatten().tolist() == [300]
    optimizer.step()
    assert bool(param.detach()[288:320].isnan().all())
    assert param.detach().isnan().sum() == 32
    param.grad[300] = bad
    optimizer.step(nonfinite="skip")
    assert state["step"] == 2


# ---- what is kept, and loaded -------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_goes_on_from_its_state_dict(cls: Any, dtype: torch.dtype) -> None:
    whole, resumed = parameters(dtype=dtype), parameters(1, dtype)
    a, b = cls(whole), cls(resumed)
    for t in range(3):
        give_grads(t, whole)
        a.step()
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        for p, q in zip(whole, resumed, strict=True):
            q.copy_(p)
    b.load_state_dict(saved)
    for p, q in zip(whole, resumed, strict=True):
        assert same_state(state_of(a, p), state_of(b, q))
    for t in range(3, 6):
        give_grads(t, whole, resumed)
        a.step()
        b.step()
    for p, q in zip(whole, resumed, strict=True):
        assert torch.equal(p, q)
        assert same_state(state_of(a, p), state_of(b, q))


def test_copies_take_the_next_step_alike() -> None:
    params = parameters()
    optimizer = optim.AdamWCompact(params)
    give_grads(0, params)
    optimizer.step()
    made = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    lists = [params] + [o.param_groups[0]["params"] for o in made]
    give_grads(1, *lists)
    for one in (optimizer, *made):
        one.step()
    for same in zip(*lists, strict=True):
        assert all(torch.equal(same[0], other) for other in same[1:])


def test_parameters_changed_by_other_means_become_the_master_weights() -> None:
    params = parameters()
    optimizer = optim.AdamWCompact(params)
    give_grads(0, params)
    optimizer.step()
    with torch.no_grad():
        params[0].fill_(1.0)
    optimizer.sync_master_weights()
    assert not any(bool(state_of(optimizer, p)["error_bits"].any()) for p in params)
    assert not any("master_param" in state_of(optimizer, p) for p in params)


def test_a_transposed_parameter_is_taken_in_the_order_of_memory() -> None:
    base = torch.randn(70, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    a, b = Parameter(base.t().contiguous()), Parameter(base.t().contiguous().t())
    grad = torch.randn(80, 70, generator=torch.Generator().manual_seed(2)).bfloat16()
    a.grad, b.grad = grad, grad.clone().t()
    one, other = optim.AdamWCompact([a]), optim.AdamWCompact([b])
    for _ in range(3):
        one.step()
        other.step()
    assert torch.equal(a, b.t())
    assert torch.equal(one.state[a]["error_bits"], other.state[b]["error_bits"].t())


def test_maximize_and_lists_of_groups_work() -> None:
    params = parameters()
    groups = [
        {"params": params[:2]},
        {"params": params[2:], "master_weight_bits": None, "maximize": True},
    ]
    optimizer = optim.AdamWCompact(groups, lr=0.1, weight_decay=0.0)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    kinds = ["error_bits" in state_of(optimizer, p) for p in params]
    assert kinds == [True, True, False, False, False, False]
    for p, old in zip(params, before, strict=True):
        moved = (p.detach() - old).float()
        assert bool((moved < 0).all() if p is params[0] or p is params[1] else
                    (moved > 0).all())  # fmt: skip


def test_stochastic_rounding_takes_the_place_of_corrections() -> None:
    params = [Parameter(torch.ones(4000, dtype=torch.bfloat16)) for _ in range(2)]
    options = {"lr": 2e-4, "weight_decay": 0.0, "master_weight_bits": None}
    made = [
        optim.AdamWCompact([p], stochastic_rounding=True, rounding_seed=s, **options)
        for s, p in enumerate(params)
    ]
    for _ in range(20):
        for p, optimizer in zip(params, made, strict=True):
            p.grad = torch.full_like(p, -1.0)
            optimizer.step()
    means = [p.detach().double().mean().item() for p in params]
    assert not torch.equal(*params)
    assert all(abs(mean - 1.004) < 5e-4 for mean in means)


# ---- what is rejected ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master_weight_bits": 32}, "master_weight_bits is 32; expected 24 or None"),
        ({"master_weight_bits": "24"}, "master_weight_bits is '24'; expected 24 or"),
        (
            {"master_weights": True},
            "master_weights=True: compact state takes its place",
        ),
        ({"fp32_state": True}, "fp32_state=True: compact state takes its place"),
        ({"stochastic_rounding": True}, "with master_weight_bits=24, whose correction"),
    ],
)
def test_options_that_do_not_go_together_are_rejected(
    options: dict[str, Any], message: str
) -> None:
    for cls in CLASSES:
        with pytest.raises(ValueError, match=message):
            cls(parameters(), **options)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.float64, {}, "is float64, and compact state is computed in float32"),
        (torch.float16, {}, "is float16, and master_weight_bits=24 is for bfloat16"),
        (torch.bfloat16, {"master_weights": True}, "has master_weights or fp32_state"),
        (torch.bfloat16, {"stochastic_rounding": True}, "has stochastic_rounding and"),
        (torch.bfloat16, {"master_weight_bits": 32}, r"must be in \[24, 25\), got 32"),
        (torch.bfloat16, {"amsgrad": True}, r"'amsgrad'\] is True"),
    ],
)
def test_groups_and_parameters_that_do_not_fit_are_named(
    dtype: torch.dtype, options: dict[str, Any], message: str
) -> None:
    params = parameters(dtype=dtype)
    optimizer = optim.AdamWCompact([{"params": params, **options}])
    give_grads(0, params)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("exp_avg_scale", torch.zeros(65).half(), "has 65 elements of .*; expected 66"),
        (
            "exp_avg_sq_scale",
            torch.zeros(66),
            "elements of float32; expected 66 of flo",
        ),
        ("exp_avg", torch.zeros(64, 33), r"'exp_avg' is float32 .*; expected int8"),
        ("exp_avg_sq", torch.zeros(64, 33).char(), r"is int8 .*; expected uint8"),
        ("exp_avg_sq", torch.zeros(33, 64).byte(), r"\(33, 64\); expected uint8"),
        ("error_bits", torch.zeros(64, 33).byte(), r"'error_bits' is uint8"),
        ("error_bits", None, "'error_bits' is None|NoneType"),
    ],
)
def test_state_that_does_not_fit_is_named(name: str, value: Any, message: str) -> None:
    params = parameters()
    optimizer = optim.AdamWCompact(params)
    give_grads(0, params)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    state_of(optimizer, params[0])[name] = value
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize("name", ["exp_avg_scale", "exp_avg_sq", "error_bits"])
def test_state_that_lacks_an_array_is_named(name: str) -> None:
    params = parameters()
    optimizer = optim.AdamWCompact(params)
    give_grads(0, params)
    optimizer.step()
    del state_of(optimizer, params[0])[name]
    with pytest.raises(ValueError, match=f"has no '{name}'"):
        optimizer.step()


def test_the_state_of_another_optimizer_is_named() -> None:
    for made, cls in itertools.product(
        (torch.optim.AdamW, optim.AdamW8bit), (optim.AdamWCompact,)
    ):
        params = parameters()
        other = made(params)
        give_grads(0, params)
        other.step()
        optimizer = cls(params)
        optimizer.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match=r"has no 'exp_avg(_scale)?'"):
            optimizer.step()
