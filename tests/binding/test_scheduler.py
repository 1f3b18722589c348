"""ctrainer._C.LRScheduler against the schedules of transformers."""

import copy
import gc
import inspect
import pickle
import sys
from typing import Any

import pytest
import torch
import transformers

from ctrainer import optim
from ctrainer._C import LRScheduler

TABLE = [
    ("constant", 0, 40, {}),
    ("constant", 5, 40, {}),
    ("constant_with_warmup", 7, 40, {}),
    ("linear", 0, 40, {}),
    ("linear", 10, 40, {}),
    ("linear", 40, 40, {}),
    ("linear", 50, 40, {}),
    ("cosine", 0, 40, {}),
    ("cosine", 10, 40, {}),
    ("cosine", 3, 40, {"num_cycles": 1.5}),
    ("cosine", 3, 40, {"num_cycles": 0.3}),
]


def optimizer() -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.SGD(
        [{"params": params[:1]}, {"params": params[1:], "lr": 3e-5}], lr=0.1
    )


def rates(opt: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in opt.param_groups]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("name", "warmup", "training", "options"), TABLE)
def test_every_step_equals_transformers(
    name: str, warmup: int, training: int, options: dict[str, Any]
) -> None:
    ours, theirs = optimizer(), optimizer()
    mine = optim.get_scheduler(name, ours, warmup, training, options)
    reference = transformers.get_scheduler(name, theirs, warmup, training, options)
    assert isinstance(mine, LRScheduler)
    for _ in range(60):
        assert rates(ours) == rates(theirs)
        assert mine.get_last_lr() == reference.get_last_lr()
        assert mine.state_dict() == reference.state_dict()
        mine.step()
        reference.step()


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


def test_other_schedules_come_from_transformers() -> None:
    scheduler = optim.get_scheduler("polynomial", optimizer(), 2, 20)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quadratic",), "name is 'quadratic'"),
        (("linear", -1), "num_warmup_steps"),
        (("linear", 0, -1), "num_training_steps"),
        (("cosine", 0, 1, float("inf")), "num_cycles"),
        (("linear", 0, 1, 0.5, -2), "last_epoch"),
    ],
)
def test_bad_argument_is_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRScheduler(optimizer(), *arguments)


def test_missing_step_counts_are_named() -> None:
    with pytest.raises(ValueError, match="num_warmup_steps"):
        optim.get_scheduler("linear", optimizer(), num_training_steps=3)
    with pytest.raises(ValueError, match="num_training_steps"):
        optim.get_scheduler("cosine", optimizer(), num_warmup_steps=3)


def test_added_group_is_refused() -> None:
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
    for start in range(1, 200):
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
