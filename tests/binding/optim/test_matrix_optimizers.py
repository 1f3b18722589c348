"""Adafactor against transformers', Muon against torch's and its paper, composites."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor as OriginalAdafactor

from ctrainer import optim

SHAPES = [(7,), (5, 9), (3, 4, 6), (70, 130), (2, 3, 5, 5), (1, 8), (8, 1), ()]
MATRICES = [(5, 9), (70, 130), (64, 64), (9, 1)]
STEPS = 60
Params = list[torch.nn.Parameter]


def make_params(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Params:
    random = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(
            torch.randn(s, dtype=torch.float64, generator=random).to(dtype)
        )
        for s in shapes
    ]


def give_grads(step: int, *lists: Params) -> None:
    for params in lists:
        random = torch.Generator().manual_seed(100 + step)
        for p in params:
            grad = torch.randn(p.shape, dtype=torch.float64, generator=random)
            p.grad = grad.to(p.dtype)


def distance(ours: Params, theirs: Params) -> float:
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def steps(a: Any, b: Any, ours: Params, theirs: Params, n: int = STEPS) -> None:
    for step in range(n):
        give_grads(step, ours, theirs)
        a.step()
        b.step()


# ---- Adafactor ----------------------------------------------------------------------

ADAFACTOR: list[dict[str, Any]] = [
    {},
    {"beta1": 0.9, "weight_decay": 0.01},
    {"warmup_init": True, "clip_threshold": 0.5},
    {"lr": 1e-2, "relative_step": False, "eps": (1e-10, 0.5)},
    {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "decay_rate": -0.5},
]


@pytest.mark.parametrize("options", ADAFACTOR)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adafactor_equals_transformers(options: Any, dtype: torch.dtype) -> None:
    ours, theirs = make_params(SHAPES, dtype), make_params(SHAPES, dtype)
    a = optim.Adafactor(ours, **options)
    b = OriginalAdafactor(theirs, **options)
    steps(a, b, ours, theirs)
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    # Some ten roundings a step on either side; theirs adds squares in its own dtype.
    assert distance(ours, theirs) < STEPS * 20 * unit
    for p, q in zip(ours, theirs, strict=True):
        assert a.state[p].keys() == b.state[q].keys()
        assert a.state[p]["step"] == b.state[q]["step"] == STEPS
        for name, value in b.state[q].items():
            if isinstance(value, torch.Tensor):
                most = float(value.abs().max()) * STEPS * 20 * unit
                torch.testing.assert_close(
                    a.state[p][name], value, rtol=STEPS * 20 * unit, atol=most
                )


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_adafactors_state_goes_to_transformers_and_back(beta1: float | None) -> None:
    ours, theirs = (
        make_params(SHAPES, torch.float64),
        make_params(SHAPES, torch.float64),
    )
    a = optim.Adafactor(ours, beta1=beta1)
    b = OriginalAdafactor(theirs, beta1=beta1)
    steps(a, b, ours, theirs, 5)
    saved, original = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
    a.load_state_dict(original)
    b.load_state_dict(saved)
    steps(a, b, ours, theirs, 5)
    assert a.state[ours[1]]["step"] == b.state[theirs[1]]["step"] == 10
    assert distance(ours, theirs) < 10 * 20 * 2.0**-53


def test_adafactor_of_bfloat16_keeps_float32_state_as_transformers_does() -> None:
    ours, theirs = (make_params(SHAPES, torch.bfloat16) for _ in range(2))
    a, b = optim.Adafactor(ours), OriginalAdafactor(theirs)
    steps(a, b, ours, theirs, 10)
    assert a.state[ours[1]]["exp_avg_sq_row"].dtype == torch.float32
    # The update is computed in float32 by both; a rounding to bfloat16 may differ.
    assert distance(ours, theirs) <= 10 * 2.0**-8
    a.load_state_dict(copy.deepcopy(a.state_dict()))
    assert a.state[ours[1]]["exp_avg_sq_row"].dtype == torch.float32
    steps(a, b, ours, theirs, 1)


def test_adafactors_rate_does_not_compound_from_parameter_to_parameter() -> None:
    params = make_params([(4, 4)] * 3, torch.float64)
    for p in params:
        p.data.copy_(params[0].data)
    a = optim.Adafactor(params, lr=0.1, relative_step=False, scale_parameter=True)
    for p in params:
        p.grad = torch.ones(4, 4, dtype=torch.float64)
    a.step()
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])
    assert a.param_groups[0]["lr"] == 0.1


def test_adafactor_rejects_what_transformers_rejects() -> None:
    params = make_params([(2, 2)], torch.float32)
    with pytest.raises(ValueError, match="relative_step=True"):
        optim.Adafactor(params, lr=0.1)
    with pytest.raises(ValueError, match="needs relative_step"):
        optim.Adafactor(params, lr=0.1, relative_step=False, warmup_init=True)
    give_grads(0, params)
    with pytest.raises(ValueError, match="lr must be >= 0, got nan"):
        optim.Adafactor(params, relative_step=False).step()
    with pytest.raises(ValueError, match="clip_threshold must be > 0"):
        optim.Adafactor(params, clip_threshold=0.0).step()


def test_a_transposed_matrix_is_rejected() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3).t())
    p.grad = torch.ones(4, 3).t()
    for cls in (optim.Adafactor, optim.Muon):
        with pytest.raises(ValueError, match="looks at rows and columns"):
            cls([p]).step()


def test_state_of_another_shape_is_rejected_and_nothing_changes() -> None:
    (p,) = params = make_params([(4, 3)], torch.float32)
    a = optim.Adafactor(params)
    give_grads(0, params)
    a.step()
    before = p.detach().clone()
    a.state[p]["exp_avg_sq_row"] = torch.zeros(3)
    with pytest.raises(ValueError, match="'exp_avg_sq_row' has 3 elements of float32"):
        a.step()
    assert torch.equal(p, before)


def test_empty_parameters_are_left_alone() -> None:
    params = make_params([(0, 3), (3, 0), (0,), (2, 2)], torch.float32)
    a = optim.Adafactor(params)
    m = optim.Muon([params[0], params[1], params[3]])
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        a.step()
        m.step()
    assert a.state[params[3]]["step"] == 2


# ---- Muon ---------------------------------------------------------------------------


def newton_schulz(x: torch.Tensor, n: int = 5) -> torch.Tensor:
    """The paper's iteration, in the dtype of x."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x / x.norm().clamp(min=1e-7)
    y = y.T if x.shape[0] > x.shape[1] else y
    for _ in range(n):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


class MuonOracle:
    def __init__(self, params: Params, **options: Any) -> None:
        self.params = params
        self.o = {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "adjust_lr_fn": None,
            "ns_steps": 5,
            **options,
        }
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        o = self.o
        for p, b in zip(self.params, self.buffers, strict=True):
            assert p.grad is not None
            b.mul_(o["momentum"]).add_(p.grad, alpha=1 - o["momentum"])
            u = p.grad + o["momentum"] * (b - p.grad) if o["nesterov"] else b
            rows, cols = p.shape
            if o["adjust_lr_fn"] == "match_rms_adamw":
                rate = 0.2 * math.sqrt(max(rows, cols))
            else:
                rate = math.sqrt(max(1, rows / cols))
            p.mul_(1 - o["lr"] * o["weight_decay"])
            p.sub_(o["lr"] * rate * newton_schulz(u, o["ns_steps"]))


MUON: list[dict[str, Any]] = [
    {},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": 0.02, "nesterov": False, "momentum": 0.3},
    {"lr": 0.02, "ns_steps": 2, "weight_decay": 0.0, "adjust_lr_fn": "original"},
]


@pytest.mark.parametrize("options", MUON)
def test_muon_equals_the_paper_in_float64(options: Any) -> None:
    ours, theirs = (make_params(MATRICES, torch.float64) for _ in range(2))
    steps(optim.Muon(ours, **options), MuonOracle(theirs, **options), ours, theirs)
    # Each of the five rounds stretches by 3.5 at most what sums of 130 products round.
    assert distance(ours, theirs) < STEPS * 130 * 3.5**5 * 2.0**-53


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")
@pytest.mark.parametrize("options", MUON)
def test_muon_equals_torch_to_what_bfloat16_rounds(options: Any) -> None:
    ours, theirs = (make_params(MATRICES, torch.float32) for _ in range(2))
    a, b = optim.Muon(ours, **options), torch.optim.Muon(theirs, **options)
    steps(a, b, ours, theirs)
    # An update has norm 1 or so by row; torch rounds it to 8 bits, STEPS times.
    rate = options.get("lr", 1e-3) * 0.2 * math.sqrt(130)
    assert distance(ours, theirs) < STEPS * max(rate, options.get("lr", 1e-3)) * 2.0**-6
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"]
        )
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    steps(a, b, ours, theirs, 1)


def test_muons_update_is_nearly_orthogonal() -> None:
    (p,) = params = make_params([(20, 50)], torch.float32)
    a = optim.Muon(params, lr=1.0, weight_decay=0.0)
    before = p.detach().clone()
    give_grads(0, params)
    a.step()
    singular = torch.linalg.svdvals(before - p.detach())
    assert 0.5 < float(singular.min()) <= float(singular.max()) < 1.5


def test_muon_rejects_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"got a parameter of shape \(3,\)"):
        optim.Muon(make_params([(2, 2), (3,)], torch.float32))
    params = make_params([(2, 2)], torch.float32)
    give_grads(0, params)
    a = optim.Muon(params)
    a.param_groups[0]["adjust_lr_fn"] = "other"
    with pytest.raises(ValueError, match="adjust_lr_fn'] is 'other'; expected None"):
        a.step()
    a.param_groups[0]["adjust_lr_fn"] = None
    a.param_groups[0]["ns_steps"] = 2.5
    with pytest.raises(ValueError, match="ns_steps must be a whole number"):
        a.step()


# ---- composites ---------------------------------------------------------------------


def composite(params: Params) -> optim.Composite:
    return optim.Composite(
        [
            {"params": params[3:4], "optimizer": optim.Muon, "lr": 0.02},
            {"params": params[:1], "lr": 0.01, "weight_decay": 0.0},
            {"params": params[1:3], "optimizer": optim.Adafactor, "beta1": 0.9},
            {"params": params[4:5], "optimizer": optim.LAMB, "max_grad_norm": 0.0},
            {"params": params[5:6], "optimizer": optim.SGD, "momentum": 0.9},
            {"params": params[6:], "optimizer": optim.LARS, "momentum": 0.9},
        ]
    )


def separate(params: Params) -> list[Any]:
    return [
        optim.Muon(params[3:4], lr=0.02),
        optim.AdamW(params[:1], lr=0.01, weight_decay=0.0),
        optim.Adafactor(params[1:3], beta1=0.9),
        optim.LAMB(params[4:5], max_grad_norm=0.0),
        optim.SGD(params[5:6], momentum=0.9),
        optim.LARS(params[6:], momentum=0.9),
    ]


def test_a_composite_does_what_its_optimizers_do_apart() -> None:
    ours, theirs = (make_params(SHAPES, torch.float32) for _ in range(2))
    one, several = composite(ours), separate(theirs)
    for step in range(5):
        give_grads(step, ours, theirs)
        one.step()
        for optimizer in several:
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
    for optimizer in several:
        for p in optimizer.state:
            mine = one.state[ours[[q is p for q in theirs].index(True)]]
            assert mine.keys() == optimizer.state[p].keys()


def test_a_composite_goes_on_from_its_state_dict() -> None:
    whole, split = (make_params(SHAPES, torch.float32) for _ in range(2))
    one, other = composite(whole), composite(split)
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(other.state_dict())
            other = composite(split)
            other.load_state_dict(saved)
        give_grads(step, whole, split)
        one.step()
        other.step()
    assert all(map(torch.equal, whole, split))


def test_a_composite_clips_by_one_norm() -> None:
    params = make_params([(4, 4), (4,)], torch.float64)
    one = optim.Composite(
        [{"params": params[:1], "optimizer": optim.Muon}, {"params": params[1:]}]
    )
    give_grads(0, params)
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in params))  # type: ignore[union-attr]
    one.step(max_norm=1.0)
    assert one.grad_norm == pytest.approx(expected, rel=1e-15)


def test_a_composite_rejects_strangers() -> None:
    params = make_params([(4, 4), (4,)], torch.float32)
    with pytest.raises(TypeError, match=r"expected one of .*Adafactor"):
        optim.Composite([{"params": params, "optimizer": torch.optim.Adam}])
    with pytest.raises(TypeError, match="momentum"):
        optim.Composite([{"params": params, "momentum": 0.9}])
    with pytest.raises(ValueError, match="Muon is for matrices"):
        optim.Composite([{"params": params, "optimizer": optim.Muon}])
    one = optim.Composite([{"params": params}])
    other = optim.Composite([{"params": params, "optimizer": optim.SGD}])
    with pytest.raises(ValueError, match=r"are \['adamw'\], those saved \['sgd'\]"):
        one.load_state_dict(other.state_dict())


def test_a_composite_takes_groups_later_and_precision_for_all() -> None:
    params = make_params([(4, 4), (4,)], torch.bfloat16)
    one = optim.Composite(
        [{"params": params[:1], "optimizer": optim.Muon}], master_weights=True
    )
    one.add_param_group({"params": params[1], "optimizer": optim.LAMB})
    give_grads(0, params)
    one.step()
    assert one.state[params[0]]["master_param"].dtype == torch.float32
    assert one.param_groups[1]["kind"] == "lamb"


@pytest.mark.parametrize("make", [composite, lambda p: optim.Adafactor(p, beta1=0.5)])
def test_threads_change_no_bit(make: Callable[[Params], Any]) -> None:
    from ctrainer import _C

    results = []
    for n in (1, 3):
        _C.set_num_threads(n)
        params = make_params([*SHAPES[:3], (300, 500), *SHAPES[4:]], torch.float32)
        optimizer = make(params)
        for step in range(3):
            give_grads(step, params)
            optimizer.step()
        results.append(params)
    _C.set_num_threads(2)
    assert all(map(torch.equal, *results))
