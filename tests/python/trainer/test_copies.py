"""Trainers and what they hold are copied and pickled, as hyper-parameter searches and
spawned processes do; what has no copies says so."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

import tiny  # noqa: E402
import torch  # noqa: E402
from draws import draws  # noqa: E402

import ctrainer  # noqa: E402
from ctrainer import _C  # noqa: E402
from ctrainer.callbacks import TrainerCallback  # noqa: E402


def cloudpickled(value: Any) -> Any:
    cloudpickle = pytest.importorskip("cloudpickle")
    return pickle.loads(cloudpickle.dumps(value))


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": cloudpickled,
}


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


class Own(ctrainer.Trainer):
    """Has attributes of its own, one of which leads back to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes = {"trainer": self, "words": ["a"]}

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.notes["words"].append("b")
        return super().compute_loss(*args, **kwargs)


def made(cls: Any = Own, **options: Any) -> Any:
    return tiny.make(
        cls, tiny.gpt2(), tiny.tokens(16), callbacks=[Counts()],
        **{"max_steps": 3, "per_device_train_batch_size": 4, **options},
    )  # fmt: skip


def trained(trainer: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    random.seed(1)
    trainer.train()
    return [p.detach().clone() for p in trainer.model.parameters()]


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def drawn_options(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    rest = draw.choice([{}, {"ema_decay": 0.5}, {"fp16": True}, {"max_grad_norm": 0.1}])
    return {
        "optim": draw.choice(["adamw_torch", "sgd", "adafactor", "adamw_8bit"]),
        "lr_scheduler_type": draw.choice(["linear", "cosine", "constant"]),
        "gradient_accumulation_steps": draw.choice([1, 2]),
        "save_strategy": draw.choice(["no", "steps"]), "save_steps": 2,
        "include_num_input_tokens_seen": draw.choice(["no", "all"]), **rest,
    }  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_trains_to_the_same_bits_before_and_after_training(way: str) -> None:
    for seed in range(draws(4, 60)):
        options = drawn_options(seed)
        original = made(**options)
        for _ in range(2):  # before training, and before more of it
            other = WAYS[way](original)
            assert type(other) is Own
            assert other.notes["trainer"] is other
            assert other.model is not original.model
            steps = other.callback_handler.callbacks[-1].steps
            weights = trained(other)
            expected = trained(original)
            assert all(map(torch.equal, weights, expected)), options
            assert losses(other) == losses(original), options
            assert other._loss_state() == original._loss_state(), options
            assert other.notes["words"] == original.notes["words"]
            assert other.callback_handler.callbacks[-1].steps == steps + 3


@pytest.mark.parametrize("cls", [transformers.Trainer, ctrainer.Trainer])
def test_a_shallow_copy_shares_what_transformers_shares(cls: Any) -> None:
    original = made(cls)
    other = copy.copy(original)
    shared = ("model", "args", "state", "callback_handler", "train_dataset")
    assert all(getattr(other, name) is getattr(original, name) for name in shared)
    other.notes = 3
    assert not hasattr(original, "notes")


def test_an_accelerator_is_made_anew() -> None:
    original = made()
    original.accelerator.device  # noqa: B018
    other = WAYS["pickle"](original)
    assert other.accelerator.sync_gradients
    assert all(map(torch.equal, trained(other), trained(original)))


def test_a_copy_for_which_there_is_no_memory_is_none() -> None:
    testcapi = pytest.importorskip("_testcapi")
    trainer, state = made(ctrainer.Trainer), None
    trainer.__getstate__()  # makes what is made once
    for start in range(200):
        testcapi.set_nomemory(start)
        try:
            state = trainer.__getstate__()
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        if state is not None:
            break
    assert start > 2
    assert state is not None
    other = ctrainer.Trainer.__new__(ctrainer.Trainer)
    other.__setstate__(pickle.loads(pickle.dumps(state)))
    assert all(map(torch.equal, trained(other), trained(trainer)))


def test_an_adapter_without_a_name_has_no_copies() -> None:
    trainer = made(ctrainer.Trainer)
    adapter = types.ModuleType("own")
    del adapter.__name__
    trainer._adapter = adapter
    with pytest.raises(AttributeError, match="__name__"):
        trainer.__getstate__()


def in_another_process(trainer: Any, results: Any) -> None:
    torch.set_num_threads(1)
    results.put([w.tolist() for w in trained(trainer)])


@pytest.mark.exhaustive
def test_a_spawned_process_trains_the_trainer_that_it_is_given() -> None:
    context = multiprocessing.get_context("spawn")
    original, results = made(), context.Queue()
    expected = trained(copy.deepcopy(original))  # torch may share memory with a child
    child = context.Process(target=in_another_process, args=(original, results))
    child.start()
    found = results.get(timeout=240)
    child.join(60)
    assert found == [w.tolist() for w in expected]


class Copies(TrainerCallback):
    trainer: Any = None
    told: str = ""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"while its train\(\) runs: copy it"):
                way(self.trainer)
            self.told += "x"


def test_a_running_trainer_says_when_to_copy_it() -> None:
    trainer, callback = made(max_steps=1), Copies()
    trainer.add_callback(callback)
    callback.trainer = trainer
    trainer.train()
    assert callback.told == "xxx"
    callback.trainer = None
    copy.deepcopy(trainer)


def handler() -> Any:
    callbacks = ctrainer.callbacks
    return callbacks.CallbackHandler(
        [callbacks.DefaultFlowCallback, Counts], 1, "p", None, 4
    )


@pytest.mark.parametrize("way", ["copy", *WAYS])
def test_a_callback_handler_keeps_callbacks_and_what_it_passes(way: str) -> None:
    original = handler()
    original.mine = "own"
    other = {**WAYS, "copy": copy.copy}[way](original)
    assert [type(c) for c in other.callbacks] == [type(c) for c in original.callbacks]
    names = ("model", "processing_class", "optimizer", "lr_scheduler", "mine")
    assert [getattr(other, n) for n in names] == [1, "p", None, 4, "own"]
    assert (other.callbacks is original.callbacks) == (way == "copy")


SCALERS = {
    "torch": lambda: _C.LossScaler(init_scale=8.0, growth_interval=3),
    "fairseq": lambda: _C.LossScaler.fairseq(init_scale=16.0),
    "deepspeed": lambda: _C.LossScaler.deepspeed(initial_scale_power=30),
    "disabled": lambda: _C.LossScaler(enabled=False),
}


@pytest.mark.parametrize("way", ["copy", *WAYS])
@pytest.mark.parametrize("kind", SCALERS)
def test_a_loss_scaler_goes_on_as_its_copy(kind: str, way: str) -> None:
    draw = random.Random(3)
    original = SCALERS[kind]()
    for _ in range(40):
        other = {**WAYS, "copy": copy.copy}[way](original)
        assert other.state_dict() == original.state_dict()
        overflow = draw.random() < 0.2
        original.update(overflow)
        other.update(overflow)
        assert (other.scale, other.state_dict()) == (
            original.scale,
            original.state_dict(),
        )


def test_states_that_no_copy_had_are_rejected() -> None:
    scaler = SCALERS["torch"]()
    _, fields = scaler.__getstate__()
    before = scaler.state_dict()
    for wrong in (
        {**fields, "dialect": 7}, {**fields, "dialect": -1},
        {**fields, "scale": float("nan")}, {**fields, "growth_interval": 0},
        {**fields, "iter": -2}, {},
    ):  # fmt: skip
        with pytest.raises((ValueError, KeyError)):
            scaler.__setstate__((None, wrong))
    for target in (scaler, handler(), made()):
        for wrong in (None, 3, (), (1, 2), ({}, {}, {}), (None, None)):
            with pytest.raises(TypeError, match="takes what __getstate__ returned"):
                target.__setstate__(wrong)
    assert scaler.state_dict() == before
    with pytest.raises(TypeError, match="no list of callbacks"):
        handler().__setstate__((None, {"callbacks": 3}))
    with pytest.raises(ValueError, match="no adapter is called 'os'"):
        made().__setstate__(({}, {"_adapter": "os"}))


# The types of the extension that keep copies of what they hold, and those whose copies
# nobody needs, which Python rejects by itself.
COPIED = {
    "CallbackHandler", "LRScheduler", "LossScaler", "Schedule", "Trainer",
}  # fmt: skip
OF_PYTHON = {"ArrayAccumulator", "FairseqOptimizer", "OptimEngine", "WeightAverage"}
TYPES = {
    name: value
    for name, value in vars(_C).items()
    if isinstance(value, type) and value.__module__ == "ctrainer._C"
}


MADE: dict[str, Callable[[], Any]] = {
    "CollectiveWork": lambda: _C.Communicator().all_reduce(np.ones(3), async_op=True),
    "DiskMemory": lambda: _C.DiskMemory(4096, "/tmp"),
    "GroupMemory": lambda: _C.Communicator().memory(64),
    "MappedMemory": lambda: _C.MappedMemory(4096),
    "OptimEngine": lambda: _C.OptimEngine("adamw"),
    "WeightAverage": lambda: _C.WeightAverage(*np.ones((2, 1, 3), np.float32)),
}
BY_OTHERS = {"GradHook", "GradReducer", "RowBuffer"}  # made by others alone
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Noted(_C.CheckpointWriter):
    def __init__(self, note: int) -> None:
        super().__init__()
        self.note = note

    def __reduce__(self) -> Any:
        return Noted, (self.note,)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_subclass_may_say_what_its_copies_are_made_of(protocol: int) -> None:
    noted = Noted(3)
    again = pickle.loads(pickle.dumps(noted, protocol))
    for made in (again, copy.copy(noted), copy.deepcopy(noted)):
        assert (type(made), made.note) == (Noted, 3)


@pytest.mark.parametrize("name", sorted(TYPES.keys() - COPIED - BY_OTHERS))
def test_what_has_no_copies_says_so(name: str) -> None:
    """In every protocol: by the first two Python would leave out what is in C."""
    cls = TYPES[name]
    value = MADE.get(name, lambda: cls.__new__(cls))()
    told = f"'.*{name}'" if name in OF_PYTHON else "be copied or pickled: it.* save a"
    for way in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=f"cannot .*{told}"):
            way(value)
    for protocol in PROTOCOLS:
        with pytest.raises(TypeError, match=f"cannot .*{told}"):
            pickle.dumps(value, protocol)


@pytest.mark.parametrize("name", BY_OTHERS)
def test_what_others_make_has_no_copies_either(name: str) -> None:
    assert TYPES[name].__reduce_ex__.__objclass__ is TYPES[name]
