"""ReduceLROnPlateau and GreedyLR against torch's and transformers'."""

import copy
import gc
import math
import pickle
import random
import sys
from typing import Any

import pytest
import torch
from transformers.optimization import GreedyLR as TheirGreedy

from ctrainer._C import GreedyLR, ReduceLROnPlateau
from ctrainer.schedules import get_scheduler

TheirPlateau = torch.optim.lr_scheduler.ReduceLROnPlateau
BOTH = [(ReduceLROnPlateau, TheirPlateau), (GreedyLR, TheirGreedy)]
PLATEAUS: list[dict[str, Any]] = [
    {},
    {"patience": 0, "factor": 0.5, "mode": "max"},
    {"patience": 1, "cooldown": 2, "threshold": 0.05, "threshold_mode": "abs"},
    {"patience": 2, "min_lr": 1e-3, "mode": "max", "threshold_mode": "abs"},
    {"patience": 0, "min_lr": [0.01, 1e-6], "eps": 1e-3, "factor": 0.7},
]
GREEDY: list[dict[str, Any]] = [
    {},
    {"patience": 0, "factor": 0.5, "mode": "max", "min_lr": 1e-6},
    {"patience": 1, "cooldown": 2, "warmup": 3, "threshold_mode": "rel"},
    {"patience": 0, "min_lr": [0.05, 1e-6], "max_lr": (0.2, 1.0), "threshold": 0.01},
    {"patience": 0, "factor": 0.6, "reset_start": 3, "mode": "max", "eps": 1e-3},
    {"patience": 1, "smooth": True, "window_size": 4, "min_lr": 0.0},
    {"patience": 0, "factor": 0.5, "reset_start": 2, "smooth": True, "window_size": 1},
]
CASES = [(*BOTH[0], o) for o in PLATEAUS] + [(*BOTH[1], o) for o in GREEDY]


def optimizer() -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.SGD(
        [{"params": params[:1]}, {"params": params[1:], "lr": 3e-3}], lr=0.1
    )


def rates(opt: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in opt.param_groups]


def metrics(seed: int, n: int) -> list[float]:
    """Progress, plateaus, setbacks, ties, and numbers that are none."""
    source = random.Random(seed)
    level, made = 5.0, []
    for _ in range(n):
        level += source.choice([-0.4, -0.02, 0.0, 0.0, 0.0, 0.3])
        made.append(source.choice([level, level, level, level, math.nan, math.inf]))
    return made


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_every_evaluation_equals_the_original(
    ours: Any, theirs: Any, options: dict[str, Any], seed: int
) -> None:
    mine, reference = ours(optimizer(), **options), theirs(optimizer(), **options)
    clean = options.get("smooth", False)  # NaN in a running sum stays for good
    for metric in metrics(seed, 600):
        if clean and not math.isfinite(metric):
            continue
        mine.step(metric)
        reference.step(metric)
        assert rates(mine.optimizer) == rates(reference.optimizer)
        assert mine.state_dict() == reference.state_dict()
        assert mine.get_last_lr() == reference.get_last_lr()


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_state_dicts_cross_both_ways(
    ours: Any, theirs: Any, options: dict[str, Any]
) -> None:
    """In the middle of a run, each takes the other's place; settings come along."""
    first, second = ours(optimizer(), **options), theirs(optimizer(), **options)
    for metric in metrics(7, 50):
        if math.isfinite(metric):
            first.step(metric)
            second.step(metric)
    their_opt, our_opt = optimizer(), optimizer()
    their_opt.load_state_dict(first.optimizer.state_dict())
    our_opt.load_state_dict(second.optimizer.state_dict())
    mine, reference = ours(our_opt), theirs(their_opt)
    mine.load_state_dict(second.state_dict())
    reference.load_state_dict(first.state_dict())
    for metric in metrics(8, 200):
        if math.isfinite(metric):
            mine.step(metric)
            reference.step(metric)
            assert rates(our_opt) == rates(their_opt)
    assert mine.state_dict() == reference.state_dict()


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_pickle_and_deepcopy_keep_the_state(
    ours: Any, theirs: Any, options: dict[str, Any]
) -> None:
    scheduler = ours(optimizer(), **options)
    for metric in metrics(9, 40):
        scheduler.step(metric)
    for twin in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert twin.optimizer is not scheduler.optimizer
        assert str(twin.state_dict()) == str(scheduler.state_dict())  # NaN is NaN
        twin.step(1.0)
        assert twin.last_epoch == scheduler.last_epoch + 1


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_a_metric_may_be_a_tensor_and_the_epoch_given(ours: Any, theirs: Any) -> None:
    scheduler = ours(optimizer())
    scheduler.step(torch.tensor(3.0), epoch=5)
    scheduler.step(metrics=2)
    assert (scheduler.last_epoch, scheduler.best) == (6, 2.0)


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_rates_in_tensors_are_filled_in_place(ours: Any, theirs: Any) -> None:
    opt = optimizer()
    rate = opt.param_groups[0]["lr"] = torch.tensor(0.5)
    scheduler = ours(opt, patience=0, factor=0.5)
    for metric in (1.0, 2.0, 3.0):
        scheduler.step(metric)
    assert opt.param_groups[0]["lr"] is rate
    assert rate.item() == scheduler.get_last_lr()[0] != 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reduce_lr_on_plateau", {"mode": "least"}, "mode is 'least'; .* 'min' or"),
        ("reduce_lr_on_plateau", {"threshold_mode": "x"}, "threshold_mode is 'x'"),
        ("reduce_lr_on_plateau", {"factor": 1.0}, "factor must be from 0 to below 1"),
        ("reduce_lr_on_plateau", {"patience": -1}, "patience must be >= 0"),
        (
            "reduce_lr_on_plateau",
            {"min_lr": [0.1]},
            "min_lr has 1 entries",
        ),
        ("greedy", {"mode": "least"}, "mode is 'least'"),
        ("greedy", {"factor": 0.0}, "factor must be above 0"),
        ("greedy", {"max_lr": [1.0, 1.0, 1.0]}, "max_lr has 3 entries"),
        ("greedy", {"smooth": True, "window_size": 0}, "window_size must be from 1"),
        ("greedy", {"reset_start": -1}, "reset_start must be >= 0"),
    ],
)
def test_a_bad_option_is_named(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        get_scheduler(name, optimizer(), 0, 10, options)


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_an_unknown_option_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"schedule '{name}'.*num_cycles"):
        get_scheduler(name, optimizer(), 0, 10, {"num_cycles": 2})


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_a_bad_state_changes_nothing(ours: Any, theirs: Any) -> None:
    scheduler = ours(optimizer(), patience=3)
    scheduler.step(2.0)
    before = scheduler.state_dict()
    for change, error in (
        ({"mode": "least"}, ValueError),
        ({"mode": 3}, TypeError),
        ({"min_lrs": [0.0]}, ValueError),
        ({"_last_lr": ["a", "b"]}, ValueError),
        ({"patience": "x"}, TypeError),
        ({"factor": 2.0}, ValueError),
        ({"num_bad_epochs": None}, TypeError),
    ):
        with pytest.raises(error):
            scheduler.load_state_dict({**before, **change})
        assert scheduler.state_dict() == before
    with pytest.raises(KeyError):
        scheduler.load_state_dict({})
    assert scheduler.state_dict() == before


def test_a_window_that_does_not_fit_its_size_is_refused() -> None:
    scheduler = GreedyLR(optimizer(), smooth=True, window_size=2)
    state = scheduler.state_dict()
    state["_streaming_avg"]["values"] = [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="has 3 values; its window_size is 2"):
        scheduler.load_state_dict(state)


def test_a_plateau_state_of_an_older_torch_is_loaded() -> None:
    state = TheirPlateau(optimizer(), patience=3, min_lr=1e-4).state_dict()
    del state["default_min_lr"]
    scheduler = ReduceLROnPlateau(optimizer())
    scheduler.load_state_dict({**state, "verbose": False})
    assert scheduler.patience == 3
    assert scheduler.min_lrs == [1e-4, 1e-4]


def test_an_added_group_gets_the_limit_that_all_share() -> None:
    scheduler = ReduceLROnPlateau(optimizer(), patience=0, min_lr=0.05)
    new = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.06}
    scheduler.optimizer.add_param_group(new)
    scheduler.step(1.0)
    scheduler.step(1.0)
    assert rates(scheduler.optimizer) == [0.05, 3e-3, 0.05]


@pytest.mark.parametrize(
    "scheduler",
    [
        ReduceLROnPlateau(optimizer(), patience=0, min_lr=[0.05, 0.0]),
        GreedyLR(optimizer(), patience=0, smooth=True, window_size=2),
    ],
)
def test_an_added_group_without_a_limit_is_refused(scheduler: Any) -> None:
    scheduler.step(1.0)
    new = {"params": [torch.nn.Parameter(torch.zeros(1))]}
    scheduler.optimizer.add_param_group(new)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match=r"min_lrs has 2 entries; .* 3 groups"):
        scheduler.step(1.0)
    assert scheduler.state_dict() == before


def test_greedy_tells_of_its_changes_when_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scheduler = GreedyLR(optimizer(), patience=0, factor=0.5, verbose=True, min_lr=0.0)
    scheduler.step(1.0)
    scheduler.step(2.0)
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "evaluation 1: group 0 at lr 2.0000e-01",
        "evaluation 1: group 1 at lr 6.0000e-03",
        "evaluation 2: group 0 at lr 1.0000e-01",
        "evaluation 2: group 1 at lr 3.0000e-03",
    ]


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_an_uninitialised_object_says_so(ours: Any, theirs: Any) -> None:
    scheduler = ours.__new__(ours)
    with pytest.raises(RuntimeError, match="__init__"):
        scheduler.step(1.0)
    with pytest.raises(RuntimeError, match="optimizer"):
        pickle.dumps(scheduler)
    assert scheduler.get_last_lr() == []


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_no_leaks(ours: Any, theirs: Any) -> None:
    opt = optimizer()
    extra = {"smooth": True} if ours is GreedyLR else {}

    def exercise() -> None:
        scheduler = ours(opt, patience=0, **extra)
        scheduler.step(1.0)
        scheduler.step(2.0)
        scheduler.load_state_dict(scheduler.state_dict())
        copy.copy(scheduler)
        with pytest.raises(KeyError):
            scheduler.load_state_dict({})

    def measure() -> tuple[int, int, int]:
        gc.collect()
        return sys.getrefcount(ours), sys.getrefcount(opt), sys.getallocatedblocks()

    exercise()
    before = measure()
    for _ in range(1000):
        exercise()
    after = measure()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 500  # less than one block in two runs


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_survives_every_failed_allocation(ours: Any, theirs: Any) -> None:
    testcapi = pytest.importorskip("_testcapi")
    opt = optimizer()
    extra = {"smooth": True} if ours is GreedyLR else {}
    for start in range(400):
        testcapi.set_nomemory(start)
        try:
            scheduler = ours(opt, patience=0, **extra)
            scheduler.step(1.0)
            scheduler.load_state_dict(scheduler.state_dict())
            return
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
    pytest.fail("never had memory enough")
