"""ctrainer.optim against torch.optim: the same numbers, the same state, live groups."""

import copy
import gc
import inspect
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_alone
from torch.nn import Parameter

from ctrainer import optim
from ctrainer._C import OptimEngine

SHAPES = [(3, 4), (5,), (2, 2, 2), ()]


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return (torch.randn(s, generator=generator).to(dtype) for s in SHAPES)


def set_gradients(params: list[Parameter], step: int) -> None:
    for param, grad in zip(params, gradients(step, params[0].dtype), strict=True):
        param.grad = grad


def by_data(tensor: torch.Tensor) -> None:
    old = tensor.data
    tensor.data = old.clone()
    old.fill_(torch.nan)


def by_set(tensor: torch.Tensor) -> None:
    old = tensor.detach().clone()
    with torch.no_grad():
        tensor.fill_(torch.nan)
        tensor.set_(old)


def by_storage(tensor: torch.Tensor) -> None:
    """As sharding does: the storage is released, and filled again elsewhere."""
    values = tensor.detach().clone()
    storage = tensor.untyped_storage()
    n_bytes = storage.nbytes()
    storage.resize_(0)
    taken = torch.full_like(values, torch.nan)
    storage.resize_(n_bytes)
    with torch.no_grad():
        tensor.copy_(values)
    assert taken.isnan().all()


# Ways to the same values in other memory; the old memory becomes NaN or is freed.
MOVES = {"data": by_data, "set_": by_set, "storage": by_storage}

CASES = [
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "maximize": True}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sixty_steps_equal_torch(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    opt = getattr(optim, name)(
        [{"params": ours[:2]}, {"params": ours[2:], "lr": 0.003}], **options
    )
    ref = getattr(torch.optim, name)(
        [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.003}], **options
    )
    for step in range(60):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        if step % 7 == 3:
            ours[1].grad = theirs[1].grad = None
        for group in (*opt.param_groups, *ref.param_groups):
            group["lr"] *= 0.98
        opt.step()
        ref.step()
    # A step's rounding differs by a few ulp of the update, which is below lr in size.
    bound = 60 * 4 * torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_torch(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    opt, ref = optim.AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for step in range(10):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        opt.step()
        ref.step()
    # Ours computes in fp32 and rounds once a step; torch rounds every operation.
    bound = 10 * 4 * torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=0.02)


def test_dtypes_mix_across_parameters() -> None:
    params = [
        Parameter(torch.ones(9, dtype=d)) for d in (torch.float64, torch.bfloat16)
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    optim.SGD(params, lr=0.5).step()
    assert [p.tolist() for p in params] == [[0.5] * 9] * 2


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_any_dense_order_of_memory_is_trained(name: str) -> None:
    def make() -> list[Parameter]:
        generator = torch.Generator().manual_seed(2)
        image = torch.randn(2, 3, 4, 5, generator=generator)
        matrix = torch.randn(6, 7, generator=generator)
        ordered = image.to(memory_format=torch.channels_last)
        return [Parameter(ordered), Parameter(matrix.t())]

    options = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    ours, theirs = make(), make()
    opt = getattr(optim, name)(ours, **options)
    ref = getattr(torch.optim, name)(theirs, **options)
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = (a.detach() * (step + 1)).sin()  # keeps the order of a
            b.grad = a.grad.clone()
        opt.step()
        ref.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
        for key in opt.state[a]:
            torch.testing.assert_close(opt.state[a][key], ref.state[b][key])


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torch(max_norm: float) -> None:
    ours, theirs = parameters(), parameters()
    opt, ref = optim.SGD(ours, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    ref.step()
    opt.step(max_norm=max_norm)
    assert opt.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_loss_scale_divides_gradients_before_clipping() -> None:
    ours, scaled = parameters(), parameters()
    set_gradients(ours, 0)
    for param, grad in zip(scaled, gradients(0), strict=True):
        param.grad = grad * 1024.0
    a, b = optim.AdamW(ours), optim.AdamW(scaled)
    a.step(max_norm=1.0)
    b.step(max_norm=1.0, loss_scale=1024.0)
    assert a.grad_norm == b.grad_norm
    assert all(torch.equal(x, y) for x, y in zip(ours, scaled, strict=True))


def test_zero_grads_zeroes_in_place() -> None:
    params = parameters()
    set_gradients(params, 0)
    kept = [p.grad for p in params]
    optim.AdamW(params).step(zero_grads=True)
    assert all(p.grad is g for p, g in zip(params, kept, strict=True))
    assert all(not g.any() for g in kept)


def test_parameter_without_gradient_keeps_its_count() -> None:
    params = parameters()
    opt = optim.AdamW(params)
    for step in range(3):
        set_gradients(params, step)
        if step < 2:
            params[1].grad = None
        opt.step()
    assert [opt.state[p]["step"].item() for p in params] == [3, 1, 3, 3]


def test_frozen_parameters_get_no_state() -> None:
    params = parameters()
    params[0].requires_grad_(False)
    opt = optim.AdamW(params)
    set_gradients(params, 0)
    params[0].grad = None
    opt.step()
    assert params[0] not in opt.state
    assert len(opt.state) == 3


class TestNonFinite:
    @pytest.fixture
    def params(self) -> list[Parameter]:
        params = parameters()
        set_gradients(params, 0)
        params[2].grad[0, 0, 0] = float("inf")
        return params

    def test_skip_changes_nothing(self, params: list[Parameter]) -> None:
        before = [p.clone() for p in params]
        opt = optim.AdamW(params)
        opt.step(nonfinite="skip")
        assert not opt._engine.updated
        assert not opt._engine.finite
        assert not opt.state
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))

    def test_stop_raises_and_changes_nothing(self, params: list[Parameter]) -> None:
        before = [p.clone() for p in params]
        with pytest.raises(FloatingPointError):
            optim.AdamW(params).step(nonfinite="stop", max_norm=1.0)
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))

    def test_keep_updates_as_torch_does(self, params: list[Parameter]) -> None:
        opt = optim.AdamW(params)
        opt.step()
        assert opt._engine.updated
        assert params[2][0, 0, 0].isnan()

    def test_count_does_not_advance(self, params: list[Parameter]) -> None:
        opt = optim.AdamW(params)
        opt.step(nonfinite="skip")
        set_gradients(params, 1)
        opt.step(nonfinite="skip")
        assert opt.state[params[0]]["step"].item() == 1


class TestState:
    @pytest.mark.parametrize(("name", "options"), CASES)
    def test_crosses_both_ways(self, name: str, options: dict[str, Any]) -> None:
        ours, theirs = parameters(), parameters()
        opt = getattr(optim, name)(ours, **options)
        ref = getattr(torch.optim, name)(theirs, **options)

        def train(steps: range) -> None:
            for step in steps:
                set_gradients(ours, step)
                set_gradients(theirs, step)
                opt.step()
                ref.step()

        train(range(5))
        assert opt.state_dict()["state"].keys() == ref.state_dict()["state"].keys()
        a, b = opt.state_dict(), ref.state_dict()
        assert a["param_groups"] == b["param_groups"]
        for ours_state, their_state in zip(
            a["state"].values(), b["state"].values(), strict=True
        ):
            assert list(ours_state) == list(their_state)
            for x, y in zip(ours_state.values(), their_state.values(), strict=True):
                torch.testing.assert_close(x, y)
        mine = copy.deepcopy(opt.state_dict())  # loading shares tensors, in torch too
        opt.load_state_dict(copy.deepcopy(ref.state_dict()))
        ref.load_state_dict(mine)
        train(range(5, 10))
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y)

    def test_deepcopy_and_pickle_continue_alike(self) -> None:
        params = parameters()
        opt = optim.AdamW(params, lr=0.1)
        set_gradients(params, 0)
        opt.step()
        twins = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
        set_gradients(params, 1)
        opt.step()
        for twin in twins:
            inner = twin.param_groups[0]["params"]
            set_gradients(inner, 1)
            twin.step()
            assert all(torch.equal(a, b) for a, b in zip(inner, params, strict=True))

    def test_replaced_and_deleted_state_is_seen(self) -> None:
        params = parameters()
        opt = optim.AdamW(params)
        set_gradients(params, 0)
        opt.step()
        moment = opt.state[params[0]]["exp_avg"] = torch.zeros(3, 4)
        del opt.state[params[1]]
        opt.step()
        assert moment.any()
        assert [opt.state[p]["step"].item() for p in params] == [2, 1, 2, 2]

    def test_memory_given_by_data_is_seen(self) -> None:
        params = parameters()
        opt = optim.AdamW(params)
        set_gradients(params, 0)
        opt.step()
        for param in params:
            param.data = param.data.clone()
            for value in opt.state[param].values():
                value.data = value.data.clone()
        gc.collect()
        opt.step()
        assert [s["step"].item() for s in opt.state.values()] == [2, 2, 2, 2]

    @pytest.mark.parametrize("way", MOVES)
    @pytest.mark.parametrize("what", ["parameter", "gradient", "state"])
    def test_memory_that_moves_between_updates_is_the_updates(
        self, what: str, way: str
    ) -> None:
        ours, theirs = parameters(), parameters()
        opt, ref = optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
        for step in range(4):
            set_gradients(ours, step)
            set_gradients(theirs, step)
            for params, optimizer in ((ours, opt), (theirs, ref)):
                for param in params:
                    grad = param.grad
                    assert grad is not None
                    of = {"parameter": [param], "gradient": [grad]}
                    for tensor in of.get(what, optimizer.state[param].values()):
                        MOVES[way](tensor)
                optimizer.step()
        gc.collect()
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y)

    def test_group_added_in_the_middle_is_trained(self) -> None:
        params = parameters()
        opt = optim.SGD(params[:2], lr=0.5, momentum=0.9)
        set_gradients(params, 0)
        opt.step()
        opt.add_param_group({"params": params[2:], "lr": 0.25})
        before = params[2].clone()
        opt.step()
        torch.testing.assert_close(params[2], before - 0.25 * params[2].grad)

    def test_float64_and_int64_counts_are_kept(self) -> None:
        params = parameters()[:2]
        opt = optim.AdamW(params)
        for param, dtype in zip(params, (torch.float64, torch.int64), strict=True):
            param.grad = torch.ones_like(param)
            opt.state[param] = {
                "step": torch.tensor(4, dtype=dtype),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        opt.step()
        assert [opt.state[p]["step"].item() for p in params] == [5, 5]

    def test_old_sgd_state_with_none_starts_anew(self) -> None:
        param = Parameter(torch.ones(3))
        param.grad = torch.ones(3)
        opt = optim.SGD([param], lr=0.5, momentum=0.9, dampening=0.5)
        opt.state[param]["momentum_buffer"] = None
        opt.step()
        assert opt.state[param]["momentum_buffer"].tolist() == [1.0] * 3


class TestTorchConventions:
    def test_is_an_instance_of_torchs_class(self) -> None:
        assert isinstance(optim.AdamW(parameters()), torch.optim.AdamW)
        assert isinstance(optim.SGD(parameters()), torch.optim.SGD)

    @pytest.mark.parametrize("name", ["AdamW", "SGD"])
    def test_signature_is_torchs(self, name: str) -> None:
        ours = inspect.signature(getattr(optim, name)).parameters
        theirs = inspect.signature(getattr(torch.optim, name)).parameters
        assert list(ours) == [*theirs, "precision"]
        assert [ours[name].default for name in theirs] == [
            p.default for p in theirs.values()
        ]

    def test_closure_is_run_and_its_loss_returned(self) -> None:
        param = Parameter(torch.tensor([2.0]))
        opt = optim.SGD([param], lr=0.25)

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = (param**2).sum()
            loss.backward()
            return loss

        with torch.no_grad():
            assert opt.step(closure).item() == 4.0
        assert param.item() == 1.0

    def test_step_hooks_are_called(self) -> None:
        params, calls = parameters(), []
        opt = optim.AdamW(params)
        opt.register_step_pre_hook(lambda *_: calls.append("before"))
        opt.register_step_post_hook(lambda *_: calls.append("after"))
        opt.step()
        assert calls == ["before", "after"]

    @pytest.mark.filterwarnings("error")
    def test_torchs_schedulers_drive_the_rate(self) -> None:
        params = parameters()
        opt = optim.SGD(params, lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.5)
        before = params[1].clone()
        for step in range(2):
            set_gradients(params, step)
            before -= opt.param_groups[0]["lr"] * params[1].grad
            opt.step()
            scheduler.step()
        assert opt.param_groups[0]["lr"] == 0.25
        torch.testing.assert_close(params[1].detach(), before)

    def test_grad_scaler_unscales_even_when_fused_is_asked_for(self) -> None:
        param = Parameter(torch.ones(2))
        opt = optim.SGD([param], lr=1.0, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(param.sum()).backward()
        scaler.step(opt)
        assert param.tolist() == [0.0, 0.0]

    def test_step_does_not_import_dynamo(self) -> None:
        run_alone("optim.no_dynamo").check_returncode()


class TestRefusals:
    def test_option_is_named(self) -> None:
        with pytest.raises(ValueError, match="differentiable"):
            optim.AdamW(parameters(), differentiable=True)

    def test_option_from_a_state_dict_is_named(self) -> None:
        opt = optim.AdamW(parameters())
        reference = torch.optim.AdamW(parameters(), differentiable=True)
        opt.load_state_dict(reference.state_dict())
        with pytest.raises(ValueError, match=r"param_groups\[0\]\['differentiable'\]"):
            opt.step()

    @pytest.mark.parametrize(
        ("key", "value", "error", "message"),
        [
            ("lr", "high", TypeError, "'high'"),
            ("lr", -1.0, ValueError, "lr must be >= 0"),
            ("lr", float("nan"), ValueError, "lr must be >= 0"),
            ("betas", (0.9,), ValueError, "expected two numbers"),
            ("betas", (0.9, 1.5), ValueError, r"betas\[1\]"),
            ("eps", None, TypeError, "eps"),
            ("capturable", True, ValueError, "on the CPU"),
        ],
    )
    def test_bad_hyperparameter_is_named(
        self, key: str, value: Any, error: type, message: str
    ) -> None:
        params = parameters()
        set_gradients(params, 0)
        opt = optim.AdamW(params)
        opt.param_groups[0][key] = value
        before = [p.clone() for p in params]
        with pytest.raises(error, match=message):
            opt.step()
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))

    def test_missing_hyperparameter_is_named(self) -> None:
        opt = optim.SGD(parameters())
        del opt.param_groups[0]["momentum"]
        with pytest.raises(ValueError, match="no 'momentum'"):
            opt.step()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_norm": -1.0}, "max_norm"),
            ({"max_norm": float("nan")}, "max_norm"),
            ({"loss_scale": 0.0}, "loss_scale"),
            ({"nonfinite": "ignore"}, "nonfinite"),
        ],
    )
    def test_bad_argument_is_named(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            optim.AdamW(parameters()).step(**options)

    def test_duplicate_parameter_is_named(self) -> None:
        params = parameters()
        with pytest.warns(UserWarning, match="duplicate"):
            opt = optim.AdamW([*params, params[0]])
        with pytest.raises(ValueError, match=r"\['params'\]\[4\] is listed a second"):
            opt.step()

    def test_incomplete_state_is_named(self) -> None:
        params = parameters()
        opt = optim.AdamW(params)
        set_gradients(params, 0)
        opt.step()
        del opt.state[params[1]]["exp_avg"]
        with pytest.raises(ValueError, match=r"\['params'\]\[1\] has no 'exp_avg'"):
            opt.step()

    @pytest.mark.parametrize("made", [optim.Lion, optim.SGD])
    def test_state_under_other_names_is_not_passed_over(self, made: Any) -> None:
        """As bitsandbytes names it: Lion and SGD would begin anew."""
        options = {"momentum": 0.9} if made is optim.SGD else {}
        params = parameters()
        opt = made(params, lr=0.1, **options)
        set_gradients(params, 0)
        opt.step()
        before = [param.detach().clone() for param in params]
        for entry in opt.state.values():
            entry["state1"] = entry.popitem()[1]
        with pytest.raises(ValueError, match=r"\['params'\]\[0\] has no '"):
            opt.step()
        assert all(map(torch.equal, params, before))

    @pytest.mark.parametrize("place", range(len(SHAPES)))
    def test_a_gradient_that_cannot_be_read_changes_nothing(self, place: int) -> None:
        class Odd(Parameter):
            @property
            def grad(self) -> torch.Tensor:
                raise LookupError("the gradient is gone")

        params = parameters()
        set_gradients(params, 0)
        before = [param.detach().clone() for param in params]
        params[place] = Odd(params[place].detach())
        with pytest.raises(LookupError, match="the gradient is gone"):
            optim.AdamW(params).step()
        assert all(map(torch.equal, params, before))

    @pytest.mark.parametrize(
        "count",
        [
            torch.tensor(-1.0),
            torch.tensor(float("nan")),
            torch.zeros(2),
            torch.tensor(True),
        ],
    )
    def test_bad_count_is_named(self, count: torch.Tensor) -> None:
        params = parameters()
        opt = optim.AdamW(params)
        set_gradients(params, 0)
        opt.step()
        opt.state[params[0]]["step"] = count
        with pytest.raises(ValueError, match="'step'"):
            opt.step()

    def test_state_of_another_shape_is_named(self) -> None:
        params = parameters()
        opt = optim.AdamW(params)
        set_gradients(params, 0)
        opt.step()
        opt.state[params[0]]["exp_avg_sq"] = torch.zeros(4, 3)
        with pytest.raises(ValueError, match=r"'exp_avg_sq' is float32 \(4, 3\)"):
            opt.step()


def test_busy_engine_rejects_changes() -> None:
    param = Parameter(torch.zeros(2))
    opt = optim.SGD([param], lr=0.1)
    rejections = []

    class Meddling(float):
        def __float__(self) -> float:
            for change in (
                lambda: opt.add_param_group({"params": [Parameter(torch.ones(1))]}),
                lambda: opt.load_state_dict(opt.state_dict()),
                opt.step,
            ):
                with pytest.raises(RuntimeError, match="step"):
                    change()
                rejections.append(change)
            return 0.1

    class Rate:
        def __float__(self) -> float:
            return Meddling().__float__()

    opt.param_groups[0]["lr"] = Rate()
    opt.step()
    assert len(rejections) == 3


def test_engine_is_driven_directly_only_when_step_is_ours() -> None:
    class Overriding(optim.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return super().step(*args, **kwargs)

    class Inheriting(optim.AdamW):
        pass

    assert optim.AdamW(parameters())._native_step
    assert Inheriting(parameters())._native_step
    assert not Overriding(parameters())._native_step


def test_threads_share_the_optimizer_or_are_rejected() -> None:
    params = [Parameter(torch.zeros(300_000)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    opt = optim.SGD(params, lr=1.0)
    done, rejected = [], []

    def work() -> None:
        for _ in range(30):
            try:
                opt.step(max_norm=1e9)
                done.append(1)
            except RuntimeError:
                rejected.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) + len(rejected) == 120
    assert all((p == -len(done)).all() for p in params)


def test_no_leaks() -> None:
    params = parameters()

    def exercise() -> None:
        opt = optim.AdamW(params)
        for _ in range(2):
            set_gradients(params, 0)
            opt.step(max_norm=1.0, zero_grads=True)
        opt.param_groups[0]["lr"] = "high"
        with pytest.raises(TypeError):
            opt.step()
        params[0].grad = None
        opt.zero_grad()

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(o) for o in (OptimEngine, *params)]

    for _ in range(300):  # torch and the interpreter fill their free lists
        exercise()
    before, blocks = counts(), sys.getallocatedblocks()
    for _ in range(600):
        exercise()
    assert counts() == before
    assert sys.getallocatedblocks() - blocks < 600  # a leak a round would be more


def test_collector_sees_through_the_engine() -> None:
    param = Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    opt = optim.AdamW([param])
    opt.step()
    param.cycle = opt
    gone = weakref.ref(opt)
    del opt, param
    gc.collect()
    assert gone() is None
