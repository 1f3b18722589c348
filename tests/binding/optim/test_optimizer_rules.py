"""Every optimizer that works element by element, against its original: torch's class of
the same name, or what optimizer_oracles.py writes down from a paper or a source."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import optimizer_oracles as oracles
import pytest
import torch
from torch.nn import Parameter

from ctrainer import optim

SHAPES = [(3, 4), (5,), (2, 2, 2), ()]
STEPS = 60

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adadelta", {}),
    ("Adadelta", {"lr": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.1}),
    ("Adadelta", {"maximize": True}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.03, "weight_decay": 0.1, "eps": 1e-4}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "maximize": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": (0.3, 0.9), "eps": 1e-5, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "betas": (0.0, 0.5), "maximize": True}),
    ("Adamax", {"lr": 0.01}),
    ("Adamax", {"betas": (0.4, 0.8), "eps": 1e-3, "weight_decay": 0.1}),
    ("Adamax", {"maximize": True}),
    ("NAdam", {"lr": 0.01}),
    ("NAdam", {"betas": (0.4, 0.9), "weight_decay": 0.1, "momentum_decay": 0.3}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("RAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-5}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.4, "eps": 1e-4, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "maximize": True}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "centered": True}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "centered": True, "momentum": 0.5}),
    ("Lion", {"lr": 0.01}),
    ("Lion", {"lr": 0.01, "betas": (0.5, 0.8), "weight_decay": 0.1, "maximize": True}),
    ("AdEMAMix", {"lr": 0.01}),
    ("AdEMAMix", {"betas": (0.3, 0.99, 0.999), "t_alpha": 40, "t_beta3": 40}),
    ("AdEMAMix", {"lr": 0.01, "alpha": 2.0, "eps": 1e-3, "maximize": True}),
    ("FairseqAdam", {"lr": 0.01}),
    ("FairseqAdam", {"betas": (0.3, 0.98), "eps": 1e-3, "weight_decay": 0.1}),
    ("FairseqAdam", {"lr": 0.01, "amsgrad": True}),
    ("FairseqAdamax", {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}),
    ("FairseqAdamax", {"lr": 0.01, "bias_correction": False}),
    ("FairseqNAG", {"lr": 0.1, "momentum": 0.9}),
    ("FairseqNAG", {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}),
    ("AdamWScheduleFree", {"lr": 0.01}),
    ("AdamWScheduleFree", {"betas": (0.5, 0.9), "weight_decay": 0.1, "eps": 1e-4}),
    ("AdamWScheduleFree", {"lr": 0.01, "warmup_steps": 7, "r": 0.5}),
    ("RAdamScheduleFree", {"lr": 0.01, "betas": (0.9, 0.95)}),
    ("RAdamScheduleFree", {"weight_decay": 0.1, "r": 0.5, "silent_sgd_phase": False}),
    ("SGDScheduleFree", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGDScheduleFree", {"lr": 0.1, "warmup_steps": 5, "weight_lr_power": 0.0}),
]
# The oracle of a schedule-free one keeps x, y and z; the package, tried below, y and z.
CROSSING = [c for c in CASES if not c[0].endswith("ScheduleFree")]
TORCHS = sorted({name for name, _ in CASES if hasattr(torch.optim, name)})
NAMES = sorted({name for name, _ in CASES})


# What torch's Adam does not have before 2.7; its AdamW does it.
NEWER = {"decoupled_weight_decay"} - inspect.signature(
    torch.optim.Adam
).parameters.keys()


def original(name: str, params: Any, options: dict[str, Any]) -> Any:
    if name == "Adam" and NEWER & options.keys():
        name, options = "AdamW", {k: v for k, v in options.items() if k not in NEWER}
    return (getattr(torch.optim, name, None) or getattr(oracles, name))(
        params, **options
    )


def parameters(dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(step: int) -> Iterator[torch.Tensor]:
    """Of every size, so that no rule lives in one regime alone."""
    generator = torch.Generator().manual_seed(100 + step)
    size = 10.0 ** (step % 5 - 3)
    return (torch.randn(s, generator=generator) * size for s in SHAPES)


def set_gradients(params: list[Parameter], step: int, through: torch.dtype) -> None:
    """Gradients rounded to the type `through`; one is missing now and then."""
    for i, (param, grad) in enumerate(zip(params, gradients(step), strict=True)):
        missing = step % 7 == i
        param.grad = None if missing else grad.to(through).to(param.dtype)


def groups(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]


def make(name: str, params: Any, options: dict[str, Any]) -> Any:
    made = getattr(optim, name)(params, **options)
    if hasattr(made, "train"):
        made.train()
    return made


def train(
    pairs: list[tuple[Any, list[Parameter]]], steps: range, through: torch.dtype
) -> None:
    for step in steps:
        for opt, params in pairs:
            set_gradients(params, step, through)
            for group in opt.param_groups:
                group["lr"] *= 1.5 if step % 10 == 4 else 0.95
            opt.step()


def state_of(opt: Any, param: Parameter) -> dict[str, Any]:
    """The state but for the average that an oracle keeps and the engine does not."""
    return {k: v for k, v in opt.state[param].items() if k != "x"}


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sixty_steps_equal_the_original(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    opt = make(name, groups(ours), options)
    ref = original(name, groups(theirs), options)
    train([(opt, ours), (ref, theirs)], range(STEPS), torch.float32)
    # A step rounds differently by a few ulp of what it adds, which is below 1.
    bound = STEPS * 4 * torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)
        assert a.isfinite().all()
        x, y = state_of(opt, a), state_of(ref, b)
        assert set(x) == set(y)
        for key in x:
            torch.testing.assert_close(
                torch.as_tensor(x[key], dtype=dtype),
                torch.as_tensor(y[key], dtype=dtype),
                rtol=bound,
                atol=bound,
            )


@pytest.mark.parametrize(("name", "options"), CASES)
def test_bfloat16_is_off_by_its_own_roundings_alone(
    name: str, options: dict[str, Any]
) -> None:
    ours = parameters(torch.bfloat16)
    theirs = [Parameter(p.detach().double()) for p in ours]
    opt = make(name, groups(ours), {**options, "fp32_state": True})
    ref = original(name, groups(theirs), options)
    train([(opt, ours), (ref, theirs)], range(STEPS), torch.bfloat16)
    # The gradients do not depend on the parameters, so the errors add up: half an ulp
    # of bfloat16 a step, which is 2**-9 of the size, and as much again where a rule
    # feeds the rounded parameter back into its state (weight decay, the iterate y).
    for a, b in zip(ours, theirs, strict=True):
        size = max(4.0, b.abs().max().item())
        off = (a.detach().double() - b.detach()).abs().max().item()
        assert off < STEPS * size * 2**-9 * 2
        floats = [v for v in opt.state[a].values() if v.ndim == a.ndim and v.ndim]
        assert all(v.dtype == torch.float32 for v in floats)


@pytest.mark.parametrize(("name", "options"), CROSSING)
def test_state_dict_crosses_both_ways(name: str, options: dict[str, Any]) -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    opt = make(name, groups(ours), options)
    ref = original(name, groups(theirs), options)
    pairs = [(opt, ours), (ref, theirs)]
    train(pairs, range(8), torch.float64)
    a, b = copy.deepcopy(opt.state_dict()), copy.deepcopy(ref.state_dict())
    # The option of ours that fairseq's forms come with.
    own = {"fp32_state", *(NEWER if name == "Adam" else ())}
    assert [g.keys() - own for g in a["param_groups"]] == [
        g.keys() for g in b["param_groups"]
    ]
    for x, y in zip(a["state"].values(), b["state"].values(), strict=True):
        assert [(k, type(v)) for k, v in x.items()] == [
            (k, type(v)) for k, v in y.items()
        ]
    opt.load_state_dict(b)
    ref.load_state_dict(a)
    train(pairs, range(8, 16), torch.float64)
    bound = 16 * 4 * torch.finfo(torch.float64).eps
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=bound, atol=bound)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_copies_and_resumed_runs_give_the_same_bits(
    name: str, options: dict[str, Any]
) -> None:
    params = parameters(torch.float32)
    opt = make(name, groups(params), options)
    train([(opt, params)], range(5), torch.float32)
    resumed = [Parameter(p.detach().clone()) for p in params]
    loaded = make(name, groups(resumed), options)
    loaded.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    twins = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt)), loaded]
    train([(opt, params)], range(5, 10), torch.float32)
    for twin in twins:
        inner = [p for g in twin.param_groups for p in g["params"]]
        train([(twin, inner)], range(5, 10), torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(inner, params, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_groups_keep_their_own_options(name: str) -> None:
    both, alone = parameters(torch.float64), parameters(torch.float64)
    options = [o for n, o in CASES if n == name]
    first, second = options[0], options[-1]
    opt = make(
        name,
        [{"params": both[:2], **first}, {"params": both[2:], **second}],
        {"lr": 0.01},
    )  # torch's Adagrad takes no first sum from a group; ours does
    parts = [
        make(name, alone[:2], {"lr": 0.01, **first}),
        make(name, alone[2:], {"lr": 0.01, **second}),
    ]
    for step in range(9):
        for params in (both, alone):
            set_gradients(params, step, torch.float64)
        opt.step()
        for part in parts:
            part.step()
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))


@pytest.mark.parametrize("name", TORCHS)
def test_is_torchs_class_with_torchs_signature(name: str) -> None:
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)
    assert issubclass(ours, theirs)
    mine = dict(inspect.signature(ours).parameters)
    assert mine.pop("precision").kind is inspect.Parameter.VAR_KEYWORD
    expected = inspect.signature(theirs).parameters
    known = {n: p for n, p in mine.items() if n in expected or n not in NEWER}
    assert [(n, p.default, p.kind) for n, p in known.items()] == [
        (n, p.default, p.kind) for n, p in expected.items()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_sparse_gradients_are_rejected_by_name(name: str) -> None:
    param = Parameter(torch.ones(4, 2))
    opt = make(name, [param], {"lr": 0.1})
    param.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises((TypeError, ValueError), match="sparse"):
        opt.step()
    assert (param == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_out_of_range_is_named_and_nothing_changes(name: str) -> None:
    params = parameters(torch.float32)
    opt = make(name, params, {"lr": 0.1})
    set_gradients(params, 6, torch.float32)
    before = [p.detach().clone() for p in params]
    for rate in (-1.0, float("nan")):
        opt.param_groups[0]["lr"] = rate
        with pytest.raises(ValueError, match="lr must be >= 0"):
            opt.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_an_update_skipped_for_infinity_counts_nothing(name: str) -> None:
    params = parameters(torch.float32)
    opt = make(name, params, {"lr": 0.1})
    set_gradients(params, 6, torch.float32)
    opt.step()
    before = copy.deepcopy((opt.state_dict(), params))
    params[0].grad[0, 0] = float("inf")
    opt.step(nonfinite="skip")
    after = opt.state_dict()
    assert after["param_groups"] == before[0]["param_groups"]
    assert all(torch.equal(a, b) for a, b in zip(params, before[1], strict=True))
    for a, b in zip(after["state"].values(), before[0]["state"].values(), strict=True):
        assert all((torch.as_tensor(a[k]) == torch.as_tensor(b[k])).all() for k in a)


@pytest.mark.parametrize(
    "cls",
    [
        cls
        for cls in TORCHS
        if "differentiable" in inspect.signature(getattr(torch.optim, cls)).parameters
    ],
)
def test_options_that_are_not_there_are_rejected(cls: str) -> None:
    with pytest.raises(ValueError, match="differentiable"):
        getattr(optim, cls)(parameters(torch.float32), differentiable=True)


def test_adagrad_gives_later_groups_their_own_first_sum() -> None:
    params = parameters(torch.float32)[:2]
    opt = optim.Adagrad(params[:1], lr=0.5)
    opt.add_param_group({"params": params[1:], "initial_accumulator_value": 3.0})
    params[1].grad = torch.ones(5)
    opt.step()
    assert opt.state[params[1]]["sum"].tolist() == [4.0] * 5


def test_rmsprop_counts_a_variance_below_zero_as_zero() -> None:
    param = Parameter(torch.ones(3))
    opt = optim.RMSprop([param], lr=0.1, alpha=0.5, eps=1.0, centered=True)
    opt.state[param] = {
        "step": torch.tensor(9.0),
        "square_avg": torch.ones(3),
        "grad_avg": torch.full((3,), 1.5),
    }
    param.grad = torch.ones(3)
    opt.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (torch.tensor(1.5), r"momenta must be in \[0, 1\], got 1.5"),
        (torch.tensor(float("nan")), r"momenta must be in \[0, 1\], got nan"),
        (torch.ones(2), "'mu_product' is .* expected one number of float32 or float64"),
        (torch.tensor(1), "'mu_product' is .* expected one number of float32"),
    ],
)
def test_nadams_product_of_momenta_is_checked(
    product: torch.Tensor, message: str
) -> None:
    params = parameters(torch.float32)
    opt = optim.NAdam(params)
    set_gradients(params, 6, torch.float32)
    opt.step()
    before = [p.detach().clone() for p in params]
    opt.state[params[0]]["mu_product"] = product
    with pytest.raises(ValueError, match=message):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_nag_writes_the_rate_of_each_update_to_its_group() -> None:
    params = parameters(torch.float32)
    opt = optim.FairseqNAG(params, lr=0.5, momentum=0.9)
    for rate in (0.25, 0.125):
        set_gradients(params, 6, torch.float32)
        opt.param_groups[0]["lr"] = rate
        opt.step()
        assert opt.param_groups[0]["lr_old"] == rate
    del opt.param_groups[0]["lr_old"]  # as in an old checkpoint
    opt.step()
    assert opt.param_groups[0]["lr_old"] == 0.125


class TestScheduleFree:
    @pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree"])
    def test_eval_gives_the_average_and_train_the_iterate(self, name: str) -> None:
        ours, theirs = parameters(torch.float64), parameters(torch.float64)
        opt = make(name, ours, {"lr": 0.05})
        ref = getattr(oracles, name)(theirs, lr=0.05)
        bound = 40 * 4 * torch.finfo(torch.float64).eps
        for step in range(30):
            for each, params in ((opt, ours), (ref, theirs)):
                set_gradients(params, step, torch.float64)
                each.step()
            if step % 10 == 3:
                kept = [p.detach().clone() for p in ours]
                opt.eval()
                ref.eval()
                opt.eval()  # a second time changes nothing
                for a, b in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(a, b, rtol=bound, atol=bound)
                opt.train()
                ref.train()
                for a, b in zip(ours, kept, strict=True):
                    torch.testing.assert_close(a.detach(), b, rtol=bound, atol=bound)

    def test_step_in_eval_mode_says_what_to_do(self) -> None:
        params = parameters(torch.float32)
        opt = optim.AdamWScheduleFree(params)
        set_gradients(params, 6, torch.float32)
        with pytest.raises(ValueError, match=r"call the optimizer's train\(\)"):
            opt.step()
        assert not opt.state

    def test_master_weights_move_with_the_parameters(self) -> None:
        param = Parameter(torch.ones(3, dtype=torch.bfloat16))
        opt = optim.SGDScheduleFree([param], lr=0.01, master_weights=True)
        opt.train()
        for _ in range(3):
            param.grad = torch.ones_like(param)
            opt.step()
        kept = opt.state[param]["master_param"].clone()
        opt.eval()
        master = opt.state[param]["master_param"]
        assert (master > kept).all()  # the average lags behind the iterate
        assert torch.equal(param, master.bfloat16())
        opt.train()
        torch.testing.assert_close(opt.state[param]["master_param"], kept)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("AdamWScheduleFree", {"betas": (0.0, 0.9)}),
            ("SGDScheduleFree", {"momentum": 1.0}),
        ],
    )
    def test_a_momentum_that_cannot_be_undone_is_rejected(
        self, name: str, options: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            getattr(optim, name)(parameters(torch.float32), **options)

    @pytest.mark.parametrize(
        ("name", "options"), [c for c in CASES if c[0].endswith("ScheduleFree")]
    )
    def test_equals_the_package_and_loads_its_state(
        self, name: str, options: dict[str, Any]
    ) -> None:
        package = pytest.importorskip("schedulefree")
        ours, theirs = parameters(torch.float64), parameters(torch.float64)
        opt = make(name, groups(ours), options)
        ref = getattr(package, name)(groups(theirs), **options)
        ref.train()
        pairs = [(opt, ours), (ref, theirs)]
        train(pairs, range(20), torch.float64)
        a, b = copy.deepcopy(opt.state_dict()), copy.deepcopy(ref.state_dict())
        assert [g.keys() for g in a["param_groups"]] == [
            g.keys() for g in b["param_groups"]
        ]
        assert [set(s) for s in a["state"].values()] == [
            set(s) for s in b["state"].values()
        ]
        opt.load_state_dict(b)
        ref.load_state_dict(a)
        train(pairs, range(20, 40), torch.float64)
        for one in (opt, ref):
            one.eval()
        bound = 40 * 4 * torch.finfo(torch.float64).eps
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ["Lion", "Lion8bit"])
def test_lion_leaves_what_has_no_sign(name: str) -> None:
    param = Parameter(torch.ones(3))
    param.grad = torch.tensor([0.0, float("nan"), 1.0])
    getattr(optim, name)([param], lr=0.5, weight_decay=0.0).step()
    assert param.tolist() == [1.0, 1.0, 0.5]
