"""ctrainer._C.LRScheduler against the schedules of transformers."""

import copy
import functools
import gc
import inspect
import pickle
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from draws import draws
from ranks import run_alone

from ctrainer import optim
from ctrainer._C import LRScheduler, write_lrs
from ctrainer.adapters import numpy as numpy_models
from ctrainer.schedules import ON_METRIC

SHAPES = ("linear", "cosine", "1-sqrt")
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine", {"num_cycles": 0.3}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 4}),
    ("cosine_with_restarts", {"num_cycles": -2.5}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.5, "lr_end": 1e-3}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 77}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.5}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.05}),
    ("warmup_stable_decay", {"num_decay_steps": 17, "num_stable_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "num_cycles": 1.5}),
    *[
        (
            "warmup_stable_decay",
            {
                "num_decay_steps": 13,
                "warmup_type": warmup,
                "decay_type": decay,
                "min_lr_ratio": 0.1,
            },
        )
        for warmup in SHAPES
        for decay in SHAPES
    ],
]
# The warm-up is none, a part, all or more than the run; a long run; an empty one.
RUNS = [(0, 40), (10, 40), (40, 40), (50, 40), (333, 6000), (3, 0)]
# But for where the original divides by zero: see test_polynomial_without_a_decay.
TABLE = [
    (name, options, warmup, training)
    for name, options in OPTIONS
    for warmup, training in RUNS
    if not (name == "polynomial" and warmup == training)
]


def optimizer() -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.SGD(
        [{"params": params[:1]}, {"params": params[1:], "lr": 3e-5}], lr=0.1
    )


def rates(opt: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in opt.param_groups]


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:Both num_training")
@pytest.mark.parametrize(("name", "options", "warmup", "training"), TABLE)
def test_every_step_equals_transformers(
    name: str, options: dict[str, Any], warmup: int, training: int
) -> None:
    """To the last bit: the operations are Python's in the same order, and cos and pow
    are those of the C library that Python's math calls."""
    ours, theirs = optimizer(), optimizer()
    mine = optim.get_scheduler(name, ours, warmup, training, options)
    reference = transformers.get_scheduler(name, theirs, warmup, training, options)
    assert isinstance(mine, LRScheduler)
    assert isinstance(mine, torch.optim.lr_scheduler.LambdaLR)
    last = training + 59
    for ours_of, theirs_of in zip(mine.lr_lambdas, reference.lr_lambdas, strict=True):
        assert ours_of(last) == theirs_of(last)
    for _ in range(training + 60):
        assert mine.get_last_lr() == reference.get_last_lr()
        mine.step()
        reference.step()
    assert rates(ours) == rates(theirs)
    assert mine.state_dict() == reference.state_dict()


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_pickle_keeps_the_options(name: str, options: dict[str, Any]) -> None:
    scheduler = optim.get_scheduler(name, optimizer(), 3, 20, options)
    twin = pickle.loads(pickle.dumps(scheduler))
    for _ in range(30):
        scheduler.step()
        twin.step()
        assert twin.get_last_lr() == scheduler.get_last_lr()


def test_polynomial_without_a_decay_ends_at_lr_end() -> None:
    opt = optimizer()
    scheduler = optim.get_scheduler("polynomial", opt, 4, 4, {"lr_end": 1e-3})
    for _ in range(4):
        scheduler.step()
    assert rates(opt) == [0.1 * (1e-3 / 0.1), 3e-5 * (1e-3 / 0.1)]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_state_dict_crosses_both_ways() -> None:
    first, second = optimizer(), optimizer()
    mine = optim.get_scheduler("linear", first, 3, 20)
    for _ in range(7):
        mine.step()
    theirs = transformers.get_scheduler("linear", second, 3, 20)
    theirs.load_state_dict(mine.state_dict())
    theirs.step()
    mine.load_state_dict(theirs.state_dict())
    assert (mine.last_epoch, mine._step_count) == (8, 9)
    mine.step()
    theirs.step()
    assert rates(first) == rates(second)


def test_initial_lr_is_kept_for_a_later_scheduler() -> None:
    opt = optimizer()
    optim.get_scheduler("linear", opt, 5, 20)
    assert rates(opt) == [0.0, 0.0]
    assert LRScheduler(opt, "linear", 5, 20, last_epoch=4).get_last_lr() == [0.1, 3e-5]
    assert rates(opt) == [0.1, 3e-5]


def test_last_epoch_without_initial_lr_says_so() -> None:
    with pytest.raises(KeyError, match="initial_lr"):
        LRScheduler(optimizer(), "linear", 5, 20, last_epoch=3)


def test_tensor_rates_are_filled_in_place() -> None:
    opt = optimizer()
    rate = opt.param_groups[0]["lr"] = torch.tensor(0.5)
    scheduler = optim.get_scheduler("constant_with_warmup", opt, 2)
    scheduler.step()
    assert rate is opt.param_groups[0]["lr"]
    assert rate.item() == 0.25


def test_pickle_and_deepcopy_keep_the_position() -> None:
    opt = optimizer()
    scheduler = optim.get_scheduler("cosine", opt, 2, 20)
    for _ in range(9):
        scheduler.step()
    for twin in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert twin.optimizer is not opt
        assert twin.state_dict() == scheduler.state_dict()
        assert rates(twin.optimizer) == rates(opt)


@pytest.mark.parametrize("member", transformers.SchedulerType)
def test_transformers_enumeration_is_understood(member: Any) -> None:
    needed = {
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
        "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
        "warmup_stable_decay": {"num_decay_steps": 5},
    }
    made = optim.get_scheduler(member, optimizer(), 2, 20, needed.get(member.value))
    theirs = {
        "reduce_lr_on_plateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
        "greedy": transformers.optimization.GreedyLR,
    }
    assert isinstance(made, theirs.get(member.value, LRScheduler))


def levenshtein(given: str, name: str) -> int:
    """Letters to insert, to delete and to replace."""

    @functools.cache
    def of(n: int, m: int) -> int:
        if n == 0 or m == 0:
            return n + m
        replaced = of(n - 1, m - 1) + (given[n - 1] != name[m - 1])
        return min(replaced, of(n - 1, m) + 1, of(n, m - 1) + 1)

    return of(len(given), len(name))


def misspelt(chance: random.Random, name: str) -> str:
    """With one to five letters inserted, deleted or replaced."""
    letters = list(name)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(letters)) if letters else 0
        letters[at : at + chance.randint(0, 1)] = chance.choice(["", "e", "_", "zq"])
    return "".join(letters)


@pytest.mark.parametrize(
    "kind", ["linear", "cosine_with_min_lr", "warmup_stable_decay"]
)
def test_a_misspelt_option_is_told_the_nearest_that_the_schedule_has(kind: str) -> None:
    def rejection(option: str) -> str:
        with pytest.raises((TypeError, ValueError), match="has no option") as caught:
            LRScheduler(optimizer(), kind, 0, 9, {option: 1})
        return str(caught.value)

    known = rejection("").split("it takes ")[1].split(", ")
    assert {"num_warmup_steps", "num_training_steps"} <= set(known)
    chance = random.Random(kind)
    told = 0
    for _ in range(draws(200, 5000)):
        option = misspelt(chance, chance.choice(known))
        if option in known:
            continue
        far = {name: levenshtein(option, name) for name in known}
        near = [name for name in known if far[name] <= 1 + len(name) // 4]
        least = min((far[name] for name in near), default=0)
        nearest = [name for name in near if far[name] == least]
        message = rejection(option)
        if nearest:
            assert message.endswith(f"; did you mean '{nearest[0]}'?"), option
            told += 1
        else:
            assert message.endswith(f"; it takes {', '.join(known)}"), option
    assert told > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quadratic",), "name is 'quadratic'; expected one of constant, "),
        (("linear",), "needs num_warmup_steps"),
        (("cosine", 3), "needs num_training_steps"),
        (("linear", -1, 9), "num_warmup_steps must be >= 0, got -1"),
        (("linear", 0, -1), "num_training_steps"),
        (("linear", 0, 1, {"num_cycles": 2}), "'linear' has no option 'num_cycles'"),
        (("constant", 0, 1, {"num_cycles": 2}), "'constant' has no option"),
        (("cosine", 0, 1, {"num_cycles": float("inf")}), "num_cycles must be a finite"),
        (
            ("cosine", 0, 1, {"num_cycles": "two"}),
            "num_cycles is 'two'; expected a",
        ),
        (("cosine", 0, 1, {"num_warmup_steps": 2}), "num_warmup_steps is given twice"),
        (("polynomial", 0, 9, {"lr_end": 0.2}), "lr_end must be below .* 0.1, got 0.2"),
        (("polynomial", 0, 9, {"lr_init": 0.2}), "lr_init is no option"),
        (("polynomial", 0, 9, {"power": -1}), "power must be >= 0"),
        (("inverse_sqrt", 0, 9, {"timescale": 0}), "timescale must be > 0"),
        (("cosine_with_min_lr", 0, 9), "one of min_lr and min_lr_rate"),
        (
            ("cosine_with_min_lr", 0, 9, {"min_lr": 1e-3, "min_lr_rate": 0.1}),
            "both are given",
        ),
        (("warmup_stable_decay", 0, 9), "needs num_decay_steps"),
        (
            ("warmup_stable_decay", 0, None, {"num_decay_steps": 3}),
            "num_training_steps or num_stable_steps",
        ),
        (
            ("warmup_stable_decay", 0, 9, {"num_decay_steps": 3, "decay_type": "exp"}),
            "decay_type is 'exp'; expected one of linear, cosine, 1-sqrt",
        ),
        (
            ("warmup_stable_decay", 0, 9, {"num_decay_steps": 2.5}),
            "num_decay_steps must be a whole number",
        ),
        (("linear", 0, 1, None, -2), "last_epoch"),
        (("fairseq.cosine", 0, 1), "name is 'fairseq.cosine'"),
    ],
)
def test_bad_argument_is_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRScheduler(optimizer(), *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cycles": []}, "num_cycles is a list; expected a number"),
        ({3: 1}, "the option 3 is no str"),
        ([("num_cycles", 1)], "options is a list; expected a dict"),
    ],
)
def test_an_option_of_the_wrong_type_is_named(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LRScheduler(optimizer(), "cosine", 0, 9, options)


def test_an_option_of_none_counts_as_not_given() -> None:
    opt = optimizer()
    optim.get_scheduler("inverse_sqrt", opt, 0, None, {"timescale": None})
    assert rates(opt) == [0.1, 3e-5]


def test_schedules_of_the_step_work_without_torch_and_transformers() -> None:
    done = run_alone("optim.schedules_alone")
    done.check_returncode()
    names = {kind.value for kind in transformers.SchedulerType} - set(ON_METRIC)
    assert sorted(done.stdout.split("\n")) == ["", *sorted(f"{n} True" for n in names)]


@pytest.mark.parametrize("name", ON_METRIC)
def test_schedules_on_a_metric_need_an_optimizer_of_torch(name: str) -> None:
    parameter = numpy_models.Parameter(np.zeros(2, np.float32))
    told = f"schedule '{name}' is .* which needs an optimizer of torch, not SGD"
    with pytest.raises(TypeError, match=told):
        optim.get_scheduler(name, numpy_models.SGD([parameter], lr=0.1))


def test_layerwise_optimizers_are_rejected() -> None:
    class LayerWise:
        optimizer_dict: dict[Any, Any] = {}  # noqa: RUF012

    with pytest.raises(ValueError, match="LayerWise steps one optimizer for each"):
        optim.get_scheduler("linear", LayerWise(), 0, 9)


def test_added_group_is_rejected() -> None:
    opt = optimizer()
    scheduler = optim.get_scheduler("constant", opt)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="3 groups, and had 2"):
        scheduler.step()
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"base_lrs": [1.0]}, ValueError),
        ({"base_lrs": ["a", "b"]}, ValueError),
        ({"_last_lr": 3}, TypeError),
        ({"last_epoch": "x"}, TypeError),
        ({"lr_lambdas": [{"power": 2}, None]}, ValueError),
    ],
)
def test_bad_state_changes_nothing(change: dict[str, Any], error: type) -> None:
    scheduler = optim.get_scheduler("linear", optimizer(), 3, 20)
    before = scheduler.state_dict()
    with pytest.raises(error):
        scheduler.load_state_dict({**before, **change})
    with pytest.raises(KeyError):
        scheduler.load_state_dict({})
    assert scheduler.state_dict() == before


def test_rates_are_written_to_every_group_or_rejected() -> None:
    opt = optimizer()
    write_lrs(opt, [0.5, 0.25])
    assert rates(opt) == [0.5, 0.25]
    with pytest.raises(ValueError, match="the optimizer has 2 groups, and had 1"):
        write_lrs(opt, [1.0])
    with pytest.raises(TypeError, match="list"):
        write_lrs(opt, (1.0, 1.0))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="param_groups"):
        write_lrs(None, [])
    assert rates(opt) == [0.5, 0.25]


def test_uninitialised_object_says_so() -> None:
    scheduler = LRScheduler.__new__(LRScheduler)
    with pytest.raises(RuntimeError, match="__init__"):
        scheduler.step()
    assert scheduler.get_last_lr() == []
    with pytest.raises(RuntimeError, match="optimizer"):
        pickle.dumps(scheduler)


def test_hostile_groups_and_rates_raise() -> None:
    class Odd:
        param_groups: Any = 3

    with pytest.raises(TypeError):
        LRScheduler(Odd(), "constant")
    Odd.param_groups = [[]]
    with pytest.raises(TypeError, match="expected a dict"):
        LRScheduler(Odd(), "constant")
    scheduler = optim.get_scheduler("constant", optimizer())
    for rates_ in (3, ["x", "y"], [1.0]):
        scheduler.base_lrs = rates_
        with pytest.raises((TypeError, ValueError)):
            scheduler.step()


def test_signature_is_introspectable() -> None:
    names = list(inspect.signature(LRScheduler).parameters)
    assert names[:4] == ["optimizer", "name", "num_warmup_steps", "num_training_steps"]


def test_no_leaks() -> None:
    opt = optimizer()

    def exercise() -> None:
        scheduler = LRScheduler(opt, "linear", 3, 20)
        scheduler.step()
        scheduler.load_state_dict(scheduler.state_dict())
        copy.copy(scheduler)
        with pytest.raises(KeyError):
            scheduler.load_state_dict({})

    def measure() -> tuple[int, int, int]:
        gc.collect()
        return (
            sys.getrefcount(LRScheduler),
            sys.getrefcount(opt),
            sys.getallocatedblocks() // 500,
        )

    exercise()
    before = measure()
    for _ in range(1000):
        exercise()
    assert measure() == before


def test_survives_every_failed_allocation() -> None:
    testcapi = pytest.importorskip("_testcapi")
    opt = optimizer()
    for start in range(200):
        testcapi.set_nomemory(start)
        try:
            scheduler = LRScheduler(opt, "linear", 3, 20)
            scheduler.step()
            scheduler.load_state_dict(scheduler.state_dict())
            return
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
    pytest.fail("never had memory enough")


class Interrupting(str):
    """A key that is interrupted while it is compared with another."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "key"), [("linear", "num_warmup_steps"), ("polynomial", "lr_init")]
)
def test_an_interruption_while_options_are_searched_goes_on(
    name: str, key: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        LRScheduler(optimizer(), name, 3, 20, {Interrupting(key): 1})
