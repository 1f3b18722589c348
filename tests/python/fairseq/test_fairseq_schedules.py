"""fairseq's learning-rate schedules against its formulas, written out in Python.

Rates are equal to the last bit: both sides do the same operations in the same order,
and pow, log, exp and cos are those of the one C library.
"""

import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctrainer._C import Schedule
from ctrainer.fairseq import lr_scheduler as ours
from ctrainer.fairseq.config.schedules import InverseSquareRootLRScheduleConfig

Rule = Callable[[int], float]
LR = 0.3


class Optimizer:
    """What a schedule sees of a FairseqOptimizer."""

    def __init__(self) -> None:
        params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        self.optimizer = torch.optim.SGD([{"params": [p]} for p in params], lr=9.0)

    def get_lr(self) -> Any:
        return self.optimizer.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


def build(name: str, **config: Any) -> Any:
    config.setdefault("lr", [LR])
    return ours.build_lr_scheduler(name, SimpleNamespace(**config), Optimizer())


# The formulas: u updates, W of them warm-up


def inverse_sqrt(W: int, init: float) -> Rule:
    slope = (LR - init) / W
    return lambda u: init + u * slope if u < W else LR * W**0.5 * u**-0.5


def cosine(
    W: int, init: float, least: float, period: float, t_mult: float, shrink: float
) -> Rule:
    def rule(u: int) -> float:
        if u < W:
            return init + u * ((LR - init) / W)
        c = u - W
        if t_mult == 1:
            i = math.floor(c / period)
            length, t = period, c - period * i
        else:
            i = math.floor(math.log(1 - c / period * (1 - t_mult), t_mult))
            length = t_mult**i * period
            t = c - (1 - t_mult**i) / (1 - t_mult) * period
        low, high = least * shrink**i, LR * shrink**i
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * t / length))

    return rule


def polynomial(W: int, end: float, total: float, power: float) -> Rule:
    def rule(u: int) -> float:
        if W > 0 and u <= W:
            return u / W * LR
        if u >= total:
            return end
        return (LR - end) * (1 - (u - W) / (total - W)) ** power + end

    return rule


def tri_stage(steps: tuple[int, int, int], init: float, final: float) -> Rule:
    warm, hold, decay = steps

    def rule(u: int) -> float:
        if u < warm:
            return init * LR + (LR - init * LR) / warm * u
        if u < warm + hold:
            return LR
        if u <= warm + hold + decay:
            return LR * math.exp(-(-math.log(final) / decay) * (u - warm - hold))
        return final * LR

    return rule


def triangular(most: float, period: float, shrink: float, shrink_min: bool) -> Rule:
    half = period // 2

    def rule(u: int) -> float:
        cycle = math.floor(u / (2 * half))
        high = most * shrink**cycle
        low = LR * shrink**cycle if shrink_min else LR
        x = abs(u / half - 2 * (cycle + 1) + 1)
        return low + (high - low) * max(0, 1 - x)

    return rule


def step(W: int, init: float, least: float, period: int, decay: float) -> Rule:
    def rule(u: int) -> float:
        if u < W:
            return init + u * ((LR - init) / W)
        return max(LR * decay ** ((u - W) // period), least)

    return rule


BY_UPDATE: list[tuple[str, dict[str, Any], Rule]] = [
    ("inverse_sqrt", {}, inverse_sqrt(4000, 0.0)),
    (
        "inverse_sqrt",
        {"warmup_updates": 7, "warmup_init_lr": 1e-4},
        inverse_sqrt(7, 1e-4),
    ),
    ("cosine", {"max_update": 900}, cosine(0, 0.0, 0.0, 900, 1, 0.1)),
    (
        "cosine",
        {"warmup_updates": 30, "min_lr": 0.01, "max_update": 500, "lr_shrink": 0.9},
        cosine(30, 0.01, 0.01, 470, 1, 0.9),
    ),
    (
        "cosine",
        {
            "warmup_updates": 9,
            "warmup_init_lr": 1e-3,
            "t_mult": 2.0,
            "lr_period_updates": 50,
            "lr_shrink": 0.5,
        },
        cosine(9, 1e-3, 0.0, 50, 2.0, 0.5),
    ),
    (
        "cosine",
        {"t_mult": 1.3, "lr_period_updates": 37.5, "min_lr": 1e-3},
        cosine(0, 1e-3, 1e-3, 37.5, 1.3, 0.1),
    ),
    ("cosine", {"min_lr": 0.5, "max_update": 90}, cosine(0, LR, LR, 90, 1, 0.1)),
    (
        "polynomial_decay",
        {"total_num_update": 800},
        polynomial(0, 0.0, 800, 1.0),
    ),
    (
        "polynomial_decay",
        {
            "warmup_updates": 50,
            "total_num_update": 1000,
            "end_learning_rate": 0.01,
            "power": 2.5,
        },
        polynomial(50, 0.01, 1000, 2.5),
    ),
    (
        "tri_stage",
        {"warmup_steps": 40, "hold_steps": 100, "decay_steps": 300},
        tri_stage((40, 100, 300), 0.01, 0.01),
    ),
    (
        "tri_stage",
        {
            "phase_ratio": (0.1, 0.4, 0.5),
            "max_update": 777,
            "init_lr_scale": 0.1,
            "final_lr_scale": 0.05,
        },
        tri_stage((77, 310, 388), 0.1, 0.05),
    ),
    (
        "tri_stage",
        {"decay_steps": 100},
        tri_stage((0, 0, 100), 0.01, 0.01),
    ),
    ("triangular", {"max_lr": 1.0}, triangular(1.0, 5000, 0.1, False)),
    (
        "triangular",
        {"max_lr": 2.0, "lr_period_updates": 101, "lr_shrink": 0.7, "shrink_min": True},
        triangular(2.0, 101, 0.7, True),
    ),
    ("step", {}, step(0, 0.0, 0.0, 25000, 0.5)),
    (
        "step",
        {
            "warmup_updates": 20,
            "warmup_init_lr": 1e-3,
            "min_lr": 0.02,
            "lr_deacy_period": 90,
            "lr_decay": 0.7,
        },
        step(20, 1e-3, 0.02, 90, 0.7),
    ),
]


@pytest.mark.parametrize(("name", "config", "rule"), BY_UPDATE)
def test_the_rate_of_every_update_is_the_formula_s(
    name: str, config: dict[str, Any], rule: Rule
) -> None:
    scheduler = build(name, **config)
    for u in range(12_000):
        scheduler.step_update(u)
        assert scheduler.optimizer.get_lr() == rule(u), u


@pytest.mark.parametrize(("name", "config", "rule"), BY_UPDATE)
def test_the_config_stays_as_it_is(
    name: str, config: dict[str, Any], rule: Rule
) -> None:
    """fairseq writes warmup_init_lr and min_lr back into it."""
    given = SimpleNamespace(lr=[LR], **config)
    before = dict(vars(given))
    ours.build_lr_scheduler(name, given, Optimizer())
    assert vars(given) == before


def test_defaults_are_those_of_the_dataclasses() -> None:
    cfg = InverseSquareRootLRScheduleConfig()
    assert (cfg.warmup_updates, cfg.warmup_init_lr) == (4000, -1)
    assert cfg.lr == "${optimization.lr}"
    scheduler = ours.build_lr_scheduler("inverse_sqrt", cfg, Optimizer())
    assert scheduler.step_update(4000) == pytest.approx(0.25, rel=1e-15)


# Schedules by epoch


def test_fixed_rates_warm_up_and_anneal() -> None:
    rates = [0.5, 0.4, 0.3]
    scheduler = build(
        "fixed", lr=rates, force_anneal=4, lr_shrink=0.5, warmup_updates=25
    )
    u = 0
    for epoch in range(1, 9):
        base = rates[min(epoch - 1, 2)] if epoch < 4 else 0.3 * 0.5 ** (epoch + 1 - 4)
        scheduler.step_begin_epoch(epoch)
        assert scheduler.state_dict() == {"lr": base}
        for _ in range(10):
            expected = (u + 1) / 25 * base if u < 25 else base
            assert scheduler.step_update(u) == expected
            u += 1


def test_polynomial_decay_begins_epoch_e_with_rate_e() -> None:
    scheduler = build(
        "polynomial_decay", lr=[0.5, 0.4, 0.3], total_num_update=100, force_anneal=3
    )
    assert scheduler.step_begin_epoch(1) == 0.4
    assert scheduler.step_update(25) == 0.4 * 0.75
    assert scheduler.step_begin_epoch(2) == 0.3
    assert scheduler.step_update(50) == 0.15
    assert scheduler.step_begin_epoch(3) == 0.15  # annealing goes on from the rate


def test_polynomial_decay_goes_on_towards_another_end() -> None:
    scheduler = build("polynomial_decay", total_num_update=100, warmup_updates=10)
    assert scheduler.optimizer.get_lr() == 0.1 * LR
    scheduler.reinit(410, 210)
    assert scheduler.optimizer.get_lr() == LR * 0.5
    plain = build("polynomial_decay", total_num_update=100)
    plain.reinit(410, 210)
    assert plain.total_num_update == 100


def test_manual_rates_hold_until_the_next_one() -> None:
    scheduler = build(
        "manual",
        epoch2lr="{'1-3': 0.1, '5, 7': 0.2, 9: 0.3}",
        update2lr="{'10-12': 1.0, '11': 2.0, '20': 3.0}",
    )
    assert scheduler.optimizer.get_lr() == 0.1
    by_epoch = [scheduler.step_begin_epoch(e) for e in range(1, 11)]
    assert by_epoch == [0.1] * 4 + [0.2] * 4 + [0.3] * 2
    by_update = [scheduler.step_update(u) for u in (5, 10, 11, 12, 13, 19, 20, 99)]
    assert by_update == [0.3, 1.0, 2.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    assert scheduler.state_dict() == {"lr": 0.3}
    assert build("manual").optimizer.get_lr() == LR
    assert build("manual", update2lr="{'1': 7}").optimizer.get_lr() == 7.0


def test_pass_through_hands_everything_on() -> None:
    optimizer = Optimizer()
    inner = build("reduce_lr_on_plateau")
    optimizer.lr_scheduler = inner  # type: ignore[attr-defined]
    scheduler = ours.build_lr_scheduler("pass_through", SimpleNamespace(), optimizer)
    for epoch, loss in enumerate([2.0, 1.0, 3.0], 1):
        scheduler.step_begin_epoch(epoch)
        assert scheduler.step_update(epoch) == inner.optimizer.get_lr()
        scheduler.step(epoch, loss)
    assert scheduler.state_dict() == inner.state_dict()
    assert inner.lr_scheduler.best == 1.0
    scheduler.load_state_dict({"best": 0.5, "last_epoch": 3})
    assert inner.lr_scheduler.best == 0.5


# The plateau


def torchs(optimizer: Optimizer, **options: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, **options)


@pytest.mark.parametrize("maximize", [False, True])
def test_plateau_is_torch_s_after_the_warm_up(maximize: bool) -> None:
    scheduler = build(
        "reduce_lr_on_plateau", lr_shrink=0.5, lr_patience=1, lr_threshold=0.01,
        warmup_updates=25, maximize_best_checkpoint_metric=maximize,
    )  # fmt: skip
    mode: Any = "max" if maximize else "min"
    other = Optimizer()
    reference = torchs(other, factor=0.5, patience=1, threshold=0.01, mode=mode)
    losses = [5.0, 6.0, 4.0, 4.0, 4.1, 4.2, 3.0, 3.0, 3.0, 3.0, 7.0, 7.0, 7.0]
    u = 0
    for epoch, loss in enumerate(losses, 1):
        for _ in range(10):
            rate = scheduler.step_update(u)
            if u <= 25:
                assert rate == u * (LR / 25)
                other.set_lr(rate)
            u += 1
        if u > 26:
            reference.step(loss)
        assert scheduler.step(epoch, loss) == other.get_lr()
    assert other.get_lr() < LR


def test_plateau_without_a_warm_up_leaves_the_rate_to_the_epochs() -> None:
    scheduler = build("reduce_lr_on_plateau", lr_shrink=0.5)
    rates = []
    for epoch in range(1, 5):
        rates.append(scheduler.step_update(epoch))
        scheduler.step(epoch, 1.0)
    assert rates == [LR, LR, LR / 2, LR / 4]


def test_plateau_takes_a_state_of_fairseq_s() -> None:
    scheduler = build("reduce_lr_on_plateau", lr_patience=1)
    scheduler.step(1, 3.0)
    scheduler.step(2, 3.0)
    scheduler.load_state_dict({"best": 2.5, "last_epoch": 7})
    assert scheduler.state_dict() == {"best": 2.5, "last_epoch": 7, "num_bad_epochs": 0}


# Where fairseq is at fault


def test_unlike_fairseq_inverse_sqrt_without_a_warm_up_divides_by_nothing() -> None:
    scheduler = build("inverse_sqrt", warmup_updates=0)
    made = [scheduler.step_update(u) for u in (0, 1, 4, 100)]
    assert made == [LR, LR, LR / 2, LR / 10]


def test_unlike_fairseq_tri_stage_without_a_decay_goes_to_its_last_rate() -> None:
    scheduler = build("tri_stage", warmup_steps=2, hold_steps=3, decay_steps=0)
    made = [scheduler.step_update(u) for u in range(8)]
    assert made[2:] == [LR, LR, LR, LR, LR * 0.01, LR * 0.01]


def test_unlike_fairseq_phases_whose_sum_is_rounded_are_taken() -> None:
    """0.7 + 0.2 + 0.1 is 1 less a bit, which fairseq rejects."""
    assert sum((0.7, 0.2, 0.1)) != 1
    scheduler = build("tri_stage", phase_ratio=(0.7, 0.2, 0.1), max_update=100)
    assert scheduler.step_update(80) == LR


def test_unlike_fairseq_falling_cosine_cycles_have_an_end() -> None:
    """Lengths 100, 50, 25, ... add up to 200, where fairseq's logarithm fails."""
    scheduler = build("cosine", lr_period_updates=100, t_mult=0.5, min_lr=0.1)
    assert scheduler.step_update(150) == pytest.approx(LR * 0.1**2, rel=1e-12)
    assert scheduler.step_update(200) == 0.0
    kept = build("cosine", lr_period_updates=100, t_mult=0.5, min_lr=0.1, lr_shrink=1.0)
    assert kept.step_update(10_000) == 0.1


@pytest.mark.parametrize(("maximize", "best"), [(False, 0.2), (True, 0.9)])
@pytest.mark.parametrize("name", ["inverse_sqrt", "fixed", "step"])
def test_unlike_fairseq_best_follows_the_direction_of_the_metric(
    name: str, maximize: bool, best: float
) -> None:
    scheduler = build(name, maximize_best_checkpoint_metric=maximize)
    for epoch, loss in enumerate([0.5, 0.9, None, 0.2], 1):
        scheduler.step(epoch, loss)
    assert scheduler.best == best
    given = ours.SCHEDULES[name](SimpleNamespace(), Optimizer(), maximize=maximize)
    given.step(1, 0.2)
    given.step(2, 0.9)
    assert given.best == (0.9 if maximize else 0.2)


def test_unlike_fairseq_plateau_saves_its_bad_epochs() -> None:
    first = build("reduce_lr_on_plateau", lr_patience=2, lr_shrink=0.5)
    for epoch in range(1, 4):
        first.step(epoch, 1.0)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    assert state == {"best": 1.0, "last_epoch": 3, "num_bad_epochs": 2}
    second = build("reduce_lr_on_plateau", lr_patience=2, lr_shrink=0.5)
    second.load_state_dict(state)
    assert first.step(4, 1.0) == second.step(4, 1.0) == LR * 0.5


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("linear", {}, "lr_scheduler is 'linear'; expected one of"),
        ("cosine", {"lr": [0.1, 0.2]}, "lr has 2 numbers.*'fixed'"),
        ("fixed", {"lr": []}, "lr is empty"),
        ("cosine", {}, "lr_period_updates is needed"),
        ("cosine", {"max_update": 9, "warmup_updates": 9}, "above warmup_updates, 9"),
        ("cosine", {"max_update": 9, "t_mult": 0.0}, "t_mult must be > 0"),
        ("polynomial_decay", {}, "total_num_update must be > 0, got 0"),
        ("polynomial_decay", {"total_num_update": 9, "power": -1}, "power must be"),
        ("tri_stage", {}, "one of warmup_steps, hold_steps"),
        ("tri_stage", {"phase_ratio": (0.5, 0.5, 0.5), "max_update": 9}, "add up to 1"),
        ("tri_stage", {"phase_ratio": (0.5, 0.5), "max_update": 9}, "three shares"),
        ("tri_stage", {"phase_ratio": (0, 0, 1.0)}, "needs max_update above 0"),
        ("tri_stage", {"decay_steps": 9, "final_lr_scale": 0.0}, "final_lr_scale must"),
        ("triangular", {}, "needs max_lr"),
        ("triangular", {"max_lr": 0.1}, "max_lr must be above lr, 0.3, got 0.1"),
        ("triangular", {"max_lr": 1, "lr_period_updates": 1}, "lr_period_updates must"),
        ("step", {"lr_deacy_period": 0}, "lr_deacy_period must be >= 1"),
        ("step", {"lr_decay": 1.5}, "lr_decay must be <= 1"),
        ("step", {"min_lr": 0.4}, "min_lr must be below lr, 0.3, got 0.4"),
        ("reduce_lr_on_plateau", {"lr_shrink": 1.0}, "Factor should be < 1.0"),
        ("manual", {"epoch2lr": "[1]"}, "epoch2lr is .* expected a dict literal"),
        (
            "manual",
            {"update2lr": "{'x': 1}"},
            "update2lr is .* dict literal",
        ),
        ("pass_through", {}, "Optimizer has no lr_scheduler"),
    ],
)
def test_a_bad_setting_is_named(
    name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **config)


def test_something_that_is_no_optimizer_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"SGD has no get_lr\(\)"):
        ours.build_lr_scheduler("fixed", SimpleNamespace(), Optimizer().optimizer)


# The formula alone


def test_a_schedule_tells_its_name_and_options_and_is_pickled() -> None:
    made = Schedule("fairseq.triangular", {"lr": 0.1, "max_lr": 1, "shrink_min": True})
    assert made.name == "fairseq.triangular"
    expected = {"lr": 0.1, "max_lr": 1.0, "lr_shrink": 0.1, "shrink_min": True}
    assert made.options == expected
    twin = pickle.loads(pickle.dumps(made))
    assert [twin(u) for u in range(0, 9000, 700)] == [
        made(u) for u in range(0, 9000, 700)
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fairseq.linear", {}, r"one of fairseq\.fixed, fairseq\.inv"),
        (
            "fairseq.step",
            {"lr": 1, "power": 2},
            "'step' has no option 'power'",
        ),
        ("fairseq.triangular", {"shrink_min": 2}, "shrink_min must be True or False"),
        ("fairseq.step", {}, "schedule 'step' needs lr"),
    ],
)
def test_a_bad_option_of_a_formula_is_named(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(name, options)
