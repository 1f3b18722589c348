"""DeepSpeed's learning-rate schedules against its formulas, written out in Python.

Rates are equal to the last bit: both sides do the same operations in the same order,
and log and cos are those of the one C library. b is the number of the batch from 0.
"""

import inspect
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, make, rows

import ctrainer
from ctrainer import deepspeed_schedules as ours

Rule = Callable[[int], list[float]]
OWN = [0.1, 3e-3]  # the groups' rates before


def optimizer(cls: Any = torch.optim.AdamW) -> Any:
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return cls([{"params": [p], "lr": lr} for p, lr in zip(params, OWN, strict=True)])


def rates(opt: Any) -> list[float]:
    return [group["lr"] for group in opt.param_groups]


def range_test(
    least: list[float], size: int, rate: float, stairs: bool = False
) -> Rule:
    def rule(b: int) -> list[float]:
        intervals = (b + 1) / size
        if stairs:
            intervals = math.floor(intervals)
        return [x * (1 + rate * intervals) for x in least]

    return rule


def triangle(b: int, sizes: tuple[int, int], stairs: tuple[int, int] = (0, 0)) -> float:
    """Height of the cycle's triangle: 0, 1 after its first half, 0."""
    n, total = b + 1, sum(sizes)
    peak = sizes[0] / total
    x = 1.0 + n / total - math.floor(1 + n / total)
    rising = x <= peak
    count = stairs[0 if rising else 1]
    if count:
        inside = n % total
        height = inside / sizes[0] if rising else (total - inside) / sizes[1]
        return math.floor(round(height * count, 9)) / count
    return x / peak if rising else (x - 1) / (peak - 1)


def one_cycle(
    least: list[float], most: list[float], sizes: tuple[int, int],
    decay: tuple[int, float] = (0, 0.0), stairs: tuple[int, int] = (0, 0),
) -> Rule:  # fmt: skip
    def rule(b: int) -> list[float]:
        if b < sum(sizes):
            up = triangle(b, sizes, stairs)
            return [a + (z - a) * up for a, z in zip(least, most, strict=True)]
        size, rate = decay
        past = b - sum(sizes) + 1
        return [x / (1 + rate * (past / size)) if size and rate else x for x in least]

    return rule


def rise(b: int, n: int, kind: str) -> float:
    return b / n if kind == "linear" else 1 / math.log(n) * math.log(b + 1)


def warmup(
    least: list[float], most: list[float], n: int, kind: str, total: int | None = None
) -> Rule:
    n = max(n, 2)

    def rule(b: int) -> list[float]:
        if b < n:
            gamma = rise(b, n, kind)
        elif total is None:
            gamma = 1.0
        else:
            gamma = max(0.0, (total - b) / max(1, total - n))
        return [a + (z - a) * gamma for a, z in zip(least, most, strict=True)]

    return rule


def warmup_cosine(total: int, n: int, low: float, end: float, kind: str) -> Rule:
    def rule(b: int) -> list[float]:
        if b < n:
            share = low + rise(b, n, kind) * (1 - low)
        else:
            at = min(1.0, (b - n + 1) / max(1, total - n))
            share = end + (1 - end) * ((1 + math.cos(math.pi * at)) / 2)
        return [x * share for x in OWN]

    return rule


CASES: list[tuple[str, dict[str, Any], Rule]] = [
    ("LRRangeTest", {}, range_test([1e-3] * 2, 2000, 1.0)),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [1e-3, 2e-3],
            "lr_range_test_step_size": 7,
            "lr_range_test_step_rate": 0.3,
            "lr_range_test_staircase": True,
        },
        range_test([1e-3, 2e-3], 7, 0.3, stairs=True),
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1},
        one_cycle([0.01] * 2, [0.1] * 2, (2000, 2000)),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.01, 0.02],
            "cycle_max_lr": (0.1, 0.3),
            "cycle_first_step_size": 70,
            "cycle_second_step_size": 33,
            "decay_step_size": 9,
            "decay_lr_rate": 0.1,
        },
        one_cycle([0.01, 0.02], [0.1, 0.3], (70, 33), (9, 0.1)),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 70,
            "cycle_second_step_size": 33,
            "cycle_first_stair_count": 5,
            "cycle_second_stair_count": 3,
        },
        one_cycle([0.01] * 2, [0.1] * 2, (70, 33), stairs=(5, 3)),
    ),
    ("WarmupLR", {}, warmup([0.0] * 2, OWN, 1000, "log")),
    ("WarmupLR", {"warmup_num_steps": 0}, warmup([0.0] * 2, OWN, 0, "log")),
    ("WarmupLR", {"warmup_num_steps": 1}, warmup([0.0] * 2, OWN, 1, "log")),
    (
        "WarmupLR",
        {
            "warmup_min_lr": [1e-4, 1e-5],
            "warmup_max_lr": 0.2,
            "warmup_num_steps": 77,
            "warmup_type": "linear",
        },
        warmup([1e-4, 1e-5], [0.2, 0.2], 77, "linear"),
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 3000},
        warmup([0.0] * 2, [0.001] * 2, 1000, "log", 3000),
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 30, "warmup_num_steps": 40, "warmup_min_lr": 1e-4},
        warmup([1e-4] * 2, [0.001] * 2, 40, "log", 30),
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 3000},
        warmup_cosine(3000, 1000, 0.0, 1e-4, "log"),
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 300,
            "warmup_num_steps": 40,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.2,
            "warmup_type": "linear",
        },
        warmup_cosine(300, 40, 0.1, 0.2, "linear"),
    ),
]


@pytest.mark.parametrize(("name", "options", "rule"), CASES)
def test_the_rates_of_every_batch_are_the_formula_s(
    name: str, options: dict[str, Any], rule: Rule
) -> None:
    opt = optimizer()
    scheduler = ours.SCHEDULES[name](opt, **options)
    for b in range(6000):
        scheduler.step()
        assert rates(opt) == rule(b) == scheduler.get_last_lr(), b
        assert scheduler.state_dict() == {"last_batch_iteration": b}


@pytest.mark.parametrize(
    ("name", "options", "first"),
    [
        ("LRRangeTest", {}, [1e-3, 1e-3]),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 1}, [0.01, 0.01]),
        ("WarmupLR", {"warmup_min_lr": 1e-4}, [1e-4, 1e-4]),
        ("WarmupCosineLR", {"total_num_steps": 99}, [0.0, 0.0]),
    ],
)
def test_the_first_rates_are_written_at_once(
    name: str, options: dict[str, Any], first: list[float]
) -> None:
    opt = optimizer()
    assert ours.SCHEDULES[name](opt, **options).get_last_lr() == rates(opt) == first
    resumed = optimizer()
    again = ours.SCHEDULES[name](resumed, **options, last_batch_iteration=5)
    assert again.get_last_lr() == rates(resumed) == OWN


def test_the_momentum_falls_and_rises_while_the_rate_does_the_opposite() -> None:
    opt = optimizer()
    sizes, decay = (70, 33), (9, -0.01)
    scheduler = ours.OneCycle(
        opt, 0.01, 0.1, cycle_first_step_size=70, cycle_second_step_size=33,
        decay_step_size=9, decay_mom_rate=-0.01, cycle_min_mom=[0.7, 0.6],
        cycle_max_mom=0.9,
    )  # fmt: skip
    assert [group["betas"] for group in opt.param_groups] == [(0.7, 0.99), (0.6, 0.99)]
    for b in range(400):
        scheduler.step()
        if b < sum(sizes):
            up = triangle(b, sizes)
            expected = [0.9 - (0.9 - x) * up for x in (0.7, 0.6)]
        else:
            expected = [0.9 * (1 + decay[1] * ((b - sum(sizes) + 1) / decay[0]))] * 2
        betas = [group["betas"] for group in opt.param_groups]
        assert betas == [(x, 0.99) for x in expected] == scheduler.get_mom()


def test_an_optimizer_without_betas_keeps_its_momentum(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opt = optimizer(torch.optim.SGD)
    with caplog.at_level(logging.WARNING, logger="ctrainer"):
        scheduler = ours.OneCycle(opt, 0.01, 0.1)
    assert "cycle_momentum is off: SGD has no betas" in caplog.text
    scheduler.step()
    assert scheduler.get_mom() is None


def test_a_state_goes_on_where_it_was_saved() -> None:
    first = ours.WarmupDecayLR(optimizer(), 100, warmup_num_steps=10)
    for _ in range(40):
        first.step()
    second = ours.WarmupDecayLR(optimizer(), 100, warmup_num_steps=10)
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert first.get_last_lr() == second.get_last_lr() == rates(second.optimizer)


def test_a_batch_may_be_given_and_rates_in_tensors_are_filled() -> None:
    opt = optimizer()
    rate = opt.param_groups[0]["lr"] = torch.tensor(0.5, dtype=torch.float64)
    scheduler = ours.WarmupLR(opt, warmup_num_steps=10, warmup_type="linear")
    scheduler.step(last_batch_iteration=4)
    assert opt.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5 * 0.4
    cycle = ours.LRRangeTest(opt, lr_range_test_step_size=10)
    cycle.step(batch_iteration=9)
    assert cycle.get_lr() == [2e-3, 2e-3]


def test_a_wrapper_of_an_optimizer_is_looked_into() -> None:
    class Wrapper:
        optimizer = optimizer()

    scheduler = ours.WarmupCosineLR(Wrapper(), 10)
    assert scheduler.optimizer is Wrapper.optimizer
    with pytest.raises(TypeError, match="int is no optimizer: it has no param_groups"):
        ours.WarmupLR(3)


def test_a_run_shorter_than_its_warm_up_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="ctrainer"):
        ours.WarmupCosineLR(optimizer(), 30, warmup_num_steps=40)
    assert "total_num_steps, 30, is less than warmup_num_steps, 40" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("LRRangeTest", {"lr_range_test_min_lr": [1.0]}, "min_lr has 1 entries"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "step_size must be >= 1"),
        ("OneCycle", {"cycle_first_step_size": 0}, "first_step_size must be >= 1"),
        ("OneCycle", {"cycle_second_step_size": -1}, "second_step_size must be >= 0"),
        ("OneCycle", {"cycle_first_stair_count": 0.5}, "stair_count must be a whole"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps must be >= 0"),
        ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type is 'cosine'; .* log, lin"),
        ("WarmupDecayLR", {"total_num_steps": -1}, "total_num_steps must be >= 0"),
    ],
)
def test_a_bad_parameter_is_named(
    name: str, options: dict[str, Any], message: str
) -> None:
    ends = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0} if name == "OneCycle" else {}
    with pytest.raises(ValueError, match=message):
        ours.SCHEDULES[name](optimizer(), **ends, **options)


OPTIONS = [
    (name, option)
    for name, cls in ours.SCHEDULES.items()
    for option in [*inspect.signature(cls).parameters][1:]
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_misspelt_option_is_told_the_nearest(name: str, option: str) -> None:
    """As a DeepSpeed config has it under scheduler.params."""
    for wrong in (option[:-1], option.replace("_", "-"), option + "s", option.upper()):
        scheduler = {"type": name, "params": {wrong: 1}}
        expected = f"schedule '{name}' has no '{wrong}'; did you mean .*'{option}'"
        with pytest.raises(ValueError, match=expected):
            ours.SCHEDULES[scheduler["type"]](optimizer(), **scheduler["params"])


def in_a_trainer(folder: Path) -> Any:
    model = Net()
    opt = ctrainer.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = ours.WarmupDecayLR(opt, 20, warmup_num_steps=5, warmup_type="linear")
    return make(
        ctrainer.Trainer, model, rows(), max_steps=20, save_strategy="steps",
        save_steps=8, output_dir=str(folder), parts={"optimizers": (opt, scheduler)},
    )  # fmt: skip


def test_a_trainer_steps_saves_and_resumes_it(tmp_path: Path) -> None:
    trainer = in_a_trainer(tmp_path)
    trainer.train()
    rule = warmup([0.0], [0.001], 5, "linear", 20)
    history = [h for h in trainer.state.log_history if "learning_rate" in h]
    logged = [h["learning_rate"] for h in history]
    assert logged == [0.0, *(rule(b)[0] for b in range(19))]
    resumed = in_a_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert resumed.state.log_history[:20] == trainer.state.log_history[:20]
