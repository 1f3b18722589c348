"""cross_entropy and linear_cross_entropy against torch's own, in float64.

Bounds: of float32 a product of H = 24 terms is within 25 * 2^-24 of the sum of its
absolute values; gradients have two products and the softmax's 60 * 2^-24 (see
tests/core/cpu/test_cross_entropy.c), so 4e-6 of the norm has room. Logits, below 8,
are rounded to 2^-9 of themselves in bfloat16 and to 2^-12 in float16, which changes a
probability by 2^-6 or 2^-9 of itself; other roundings are smaller.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draws import draws
from ranks import run_alone

torch = pytest.importorskip("torch")

import random  # noqa: E402

import torch.nn.functional as F  # noqa: E402

from ctrainer import _C, linear_cross_entropy  # noqa: E402

BOUNDS = {
    torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 2e-2,
    torch.float16: 2.5e-3,
}  # fmt: skip
N, H, V = 60, 24, 101


def operands(dtype: Any = torch.float64, seed: int = 0) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    hidden = 0.3 * torch.randn(5, N // 5, H, generator=g)
    weight, bias = torch.randn(V, H, generator=g), torch.randn(V, generator=g)
    labels = torch.randint(0, V, (5, N // 5), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.2] = -100
    floats = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    return [*floats, labels]


def expected(operands: list[Any], with_bias: bool, **options: Any) -> Any:
    """torch's loss in float64, and leaves for its gradients."""
    leaves = [t.detach().double().requires_grad_() for t in operands[:3]]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if with_bias else None)
    loss = F.cross_entropy(logits.reshape(-1, V), operands[3].reshape(-1), **options)
    return loss, leaves


def check_near(got: Any, leaves: list[Any], bound: float) -> None:
    for mine, theirs in zip(got, leaves, strict=True):
        if mine.grad is None or theirs.grad is None:
            assert mine.grad is theirs.grad
            continue
        assert mine.grad.dtype == mine.dtype
        error = (mine.grad.double() - theirs.grad).norm()
        assert error <= bound * theirs.grad.norm()


@pytest.fixture
def nan_in_new_memory() -> Any:
    torch.use_deterministic_algorithms(True)  # fills it
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("number", range(draws(24, 400)))
def test_drawn_losses_and_gradients_are_those_of_all_logits(number: int) -> None:
    draw = random.Random(number)
    dtype = draw.choice(list(BOUNDS))
    given = operands(dtype, number)
    with_bias = draw.random() < 0.5
    options = {
        "reduction": draw.choice(["mean", "sum"]),
        "label_smoothing": draw.choice([0.0, 0.1, 1.0]),
    }
    for tensor in given[:3]:  # frozen ones
        tensor.requires_grad_(draw.random() < 0.8)
    loss = linear_cross_entropy(
        given[0], given[1], given[3], bias=given[2] if with_bias else None,
        chunk_rows=draw.choice([None, 1, 7, N]), **options,
    )  # fmt: skip
    theirs, leaves = expected(given, with_bias, **options)
    assert loss.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert abs(loss.item() - theirs.item()) <= BOUNDS[dtype] * theirs.item()
    if loss.requires_grad:
        (3.0 * loss).backward()
        (3.0 * theirs).backward()
        for mine, leaf in zip(given, leaves, strict=False):
            leaf.grad = leaf.grad if mine.requires_grad else None
        check_near(given[:3], leaves, BOUNDS[dtype])


def test_gradcheck_finds_no_difference() -> None:
    hidden, weight, bias, labels = operands()
    torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(
            h, w, labels[:1, :3], bias=b, label_smoothing=0.1, chunk_rows=2
        ),
        (hidden[:1, :3], weight, bias),
    )


def test_a_retained_graph_gives_the_gradients_twice() -> None:
    hidden, weight, _, labels = operands()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_second_derivative_is_an_error() -> None:
    hidden, weight, _, labels = operands()
    loss = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_autocast_computes_the_products_in_its_dtype() -> None:
    hidden, weight, bias, labels = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    loss.backward()
    rounded = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight, bias)]
    same = linear_cross_entropy(rounded[0], rounded[1], labels, bias=rounded[2])
    assert loss.dtype == torch.float32
    assert torch.equal(loss, same)
    theirs, leaves = expected([hidden, weight, bias, labels], True)
    theirs.backward()
    check_near([hidden, weight, bias], leaves, BOUNDS[torch.bfloat16])


def test_autocast_leaves_float64_as_it_is() -> None:
    hidden, weight, _, labels = operands()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, labels))


def test_rows_without_a_target_give_nan_or_nothing_and_no_gradient() -> None:
    hidden, weight, _, labels = operands(torch.float32)
    labels.fill_(-100)
    for reduction, check in (("mean", np.isnan), ("sum", lambda x: x == 0.0)):
        loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction)
        loss.backward()
        assert check(loss.item())
        assert not hidden.grad.any()
        assert not weight.grad.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_it_has_the_same_gradients(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    hidden, weight, _, labels = operands()
    loss = checkpoint(
        linear_cross_entropy, hidden, weight, labels, use_reentrant=reentrant
    )
    loss.backward()
    theirs, leaves = expected([hidden, weight, weight, labels], False)
    theirs.backward()
    check_near([hidden, weight], leaves[:2], 1e-14)


def test_without_recording_no_gradient_is_computed() -> None:
    hidden, weight, _, labels = operands()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    assert loss.item() == linear_cross_entropy(hidden, weight, labels).item()


def test_a_function_that_is_compiled_may_call_it() -> None:
    hidden, weight, _, labels = operands()

    @torch.compile(backend="eager")
    def loss(h: Any) -> Any:
        return 2.0 * linear_cross_entropy(torch.tanh(h), weight, labels)

    got = loss(hidden)
    got.backward()
    theirs = 2.0 * expected([torch.tanh(hidden), weight, weight, labels], False)[0]
    assert torch.allclose(got, theirs, rtol=1e-14)
    assert hidden.grad is not None


def test_float16_neither_overflows_nor_loses_what_is_small() -> None:
    """All rows of one class, whose gradients of the weight add up to 4096 * 30 in one
    chunk; and 2^14 classes of 6e-5, of which float16 holds no 2^-12th part."""
    hidden = torch.full((4096, 2), 30.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(5, 2, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad[:, 0].tolist() == pytest.approx([-24.0] + 4 * [6.0], rel=2e-3)
    weight = torch.zeros(2**14, 2, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(hidden[:4], weight, labels[:4]).backward()
    assert weight.grad[1, 0].item() == pytest.approx(30 / 2**14, rel=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, 'must be "mean" or "sum", got \'none\''),
        ({"label_smoothing": 1.5}, r"in \[0, 1\], got 1.5"),
        ({"label_smoothing": float("nan")}, r"in \[0, 1\], got nan"),
        ({"chunk_rows": 0}, "at least 1, got 0"),
        (
            {"weight": torch.zeros(V, H + 1)},
            r"hidden \(5, 12, 24\), weight \(101, 25\)",
        ),
        ({"bias": torch.zeros(3)}, r"bias \(3,\)"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels \(4,\)"),
        ({"labels": torch.zeros(5, 12)}, "labels of int64; got torch.float64 and"),
        ({"weight": torch.zeros(V, H)}, "one dtype outside of autocast"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, labels = operands()
    given = {"hidden": hidden, "weight": weight, "labels": labels, **change}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("label", [-1, V])
def test_a_label_of_no_class_is_named_with_its_row(label: int) -> None:
    hidden, weight, _, labels = operands()
    labels[3, 2] = label
    with pytest.raises(ValueError, match=rf"row 38 is {label}; expected a class"):
        linear_cross_entropy(hidden, weight, labels)


def test_arrays_of_numpy_are_rows_of_logits_too() -> None:
    logits = np.zeros((3, 6), np.float32)
    targets, losses = np.array([0, 1, 2]), np.empty(3)
    _C.cross_entropy(logits, targets, losses, classes=4, scale=2.0)
    assert np.allclose(losses, np.log(4.0), rtol=1e-15)
    wanted = np.full((3, 4), 0.5)
    wanted[range(3), targets] -= 2.0
    assert np.array_equal(logits[:, :4], wanted)
    assert not logits[:, 4:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros(3, np.float32)}, "logits of 1 dimensions"),
        ({"logits": np.zeros((3, 4), np.int64)}, "got int64 logits"),
        ({"targets": np.zeros(3, np.int32)}, "3 int32 targets"),
        ({"losses": np.zeros(3, np.float32)}, "3 float32 losses"),
        ({"losses": np.zeros(2)}, "2 float64 losses"),
        ({"classes": 5}, "classes=5"),
        ({"classes": 0}, "classes=0"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\]"),
        ({"targets": np.array([0, 1, 4])}, "target of row 2 is 4"),
    ],
)
def test_operands_of_the_kernel_are_checked(
    change: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        "logits": np.ones((3, 4), np.float32), "targets": np.zeros(3, np.int64),
        "losses": np.zeros(3), **change,
    }  # fmt: skip
    arrays = [given.pop(name) for name in ("logits", "targets", "losses")]
    with pytest.raises(ValueError, match=message):
        _C.cross_entropy(*arrays, **given)
    assert (arrays[0] == change.get("logits", np.ones(1))).all()


@pytest.mark.parametrize(
    ("how", "least", "most"), [("chunked", 0, 100), ("all", 1023, 4096)]
)
def test_the_peak_is_far_below_the_bytes_of_all_logits(
    how: str, least: int, most: int
) -> None:
    """4,096 rows of 32,768 logits are 512 MiB in float32, and so is their gradient; a
    chunk is 32 MiB."""
    done = run_alone("trainer.cross_entropy_memory", how)
    assert done.returncode == 0, done.stderr
    assert least < int(done.stdout) < most
