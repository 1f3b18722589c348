"""Hooks of Trainer: found by attribute lookup, called with what they accept."""

from __future__ import annotations

import abc
import functools
import gc
import inspect
import pickle
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
import transformers
from tiny import Net, arguments, make, rows

import ctrainer


def train(cls: type, **options: Any) -> Any:
    trainer = make(cls, Net(), rows(24), **{"max_steps": 3, **options})
    trainer.train()
    return trainer


def test_a_subclass_overrides_and_calls_super() -> None:
    class Counts(ctrainer.Trainer):
        calls = 0

        def training_step(
            self, model: Any, inputs: Any, num_items_in_batch: Any = None
        ) -> torch.Tensor:
            self.calls += 1
            return super().training_step(model, inputs, num_items_in_batch)

    assert train(Counts, gradient_accumulation_steps=1).calls == 3


def test_a_mixin_comes_first_and_passes_init_on() -> None:
    class Mixin:
        def __init__(self, *args: Any, extra: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.extra = extra

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.extra += 1
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    class Mixed(Mixin, ctrainer.Trainer):
        pass

    trainer = Mixed(Net(), arguments(max_steps=3), train_dataset=rows(), extra=10)
    trainer.train()
    assert trainer.extra == 13


def test_it_mixes_with_abstract_base_classes() -> None:
    class Base(ctrainer.Trainer, abc.ABC):
        @abc.abstractmethod
        def name(self) -> str: ...

    class Concrete(Base):
        def name(self) -> str:
            return "concrete"

    with pytest.raises(TypeError, match="abstract"):
        Base(Net(), arguments())
    assert Concrete(Net(), arguments()).name() == "concrete"
    assert type(ctrainer.Trainer) is type


def test_a_function_set_on_an_instance_wins() -> None:
    trainer = make(ctrainer.Trainer, Net(), rows(), max_steps=3)
    calls = []

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        calls.append(len(inputs["x"]))
        return model(**inputs)["loss"]

    trainer.compute_loss = compute_loss
    trainer.train()
    assert calls == [8, 8, 8]
    del trainer.compute_loss
    trainer.train()
    assert len(calls) == 3


def test_a_wrapped_method_keeps_its_signature() -> None:
    seen = []

    def traced(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            seen.append(sorted(kwargs))
            return function(*args, **kwargs)

        return wrapper

    class Traced(ctrainer.Trainer):
        training_step = traced(ctrainer.Trainer.training_step)

        @traced
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(**inputs)["loss"]

    train(Traced, max_steps=1)
    assert seen == [["num_items_in_batch"], []]


def test_the_class_may_be_patched_while_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    class Patches(ctrainer.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *rest: Any, **kw: Any) -> None:
            if state.global_step == 2:
                monkeypatch.setattr(ctrainer.Trainer, "training_step", step)

    plain = ctrainer.Trainer.training_step

    def step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        calls.append(self.state.global_step)
        return plain(self, model, inputs, num_items_in_batch)

    train(ctrainer.Trainer, max_steps=4, callbacks=[Patches()])
    assert calls == [2, 3]


# Signatures of older releases


def test_hooks_as_written_for_older_releases_run() -> None:
    class Old(ctrainer.Trainer):
        logged: list[Any]

        def training_step(self, model: Any, inputs: Any) -> torch.Tensor:
            return super().training_step(model, inputs)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False
        ) -> Any:
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

        def log(self, logs: dict[str, float]) -> None:
            self.__dict__.setdefault("logged", []).append(dict(logs))
            super().log(logs)

        def _maybe_log_save_evaluate(
            self, tr_loss: Any, model: Any, trial: Any, epoch: Any
        ) -> None:
            super()._maybe_log_save_evaluate(
                tr_loss, None, model, trial, epoch, None, None
            )

        def _get_train_sampler(self) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def create_optimizer(self) -> Any:
            return super().create_optimizer()

        def get_batch_samples(self, iterator: Any, n: int) -> Any:
            return super().get_batch_samples(iterator, n)

    trainer = train(Old)
    assert [h["loss"] for h in trainer.logged if "loss" in h] == [
        h["loss"] for h in trainer.state.log_history if "loss" in h
    ]
    assert len(trainer.logged) == 4


def test_loss_hooks_that_take_anything_are_told_everything() -> None:
    seen: list[Any] = []

    class Takes(ctrainer.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            seen.append(sorted(kwargs))
            return model(**inputs)["loss"]

        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(len(args) + len(kwargs))

    train(Takes, max_steps=1)
    assert seen[0] == ["num_items_in_batch"]
    assert seen[1] == 1


def test_the_context_manager_of_the_loss_is_entered_and_left() -> None:
    events = []

    class Context:
        def __enter__(self) -> None:
            events.append("enter")

        def __exit__(self, *exc: Any) -> None:
            events.append(exc[0])

    class InContext(ctrainer.Trainer):
        def compute_loss_context_manager(self) -> Any:
            return Context()

        def compute_loss(self, model: Any, inputs: Any) -> Any:
            events.append("loss")
            if len(events) > 4:
                raise LookupError
            return model(**inputs)["loss"]

    with pytest.raises(LookupError):
        train(InContext)
    assert events == ["enter", "loss", None, "enter", "loss", LookupError]


def test_hooks_of_data_and_optimizer_are_called() -> None:
    calls = []

    def tells(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(ctrainer.Trainer, name)(self, *args, **kwargs)

        return hook

    names = [
        "get_train_dataloader", "_get_train_sampler", "create_optimizer_and_scheduler",
        "create_optimizer", "get_decay_parameter_names", "create_scheduler",
        "_prepare_inputs", "_get_num_items_in_batch", "floating_point_ops",
        "_get_learning_rate", "store_flos", "log", "_set_signature_columns_if_needed",
    ]  # fmt: skip
    cls = type("Tells", (ctrainer.Trainer,), {n: tells(n) for n in names})
    train(cls, max_steps=1)
    assert set(calls) == set(names)


def test_labels_that_cannot_be_read_end_the_run_before_a_step_begins() -> None:
    class Unreadable(UserDict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            if name == "labels":
                raise OSError("no such shard")
            return super().__getitem__(name)

    class Uncounted(ctrainer.Trainer):
        def _get_num_items_in_batch(self, *_: Any) -> None:
            return None

    class Begins(ctrainer.TrainerCallback):
        steps = 0

        def on_step_begin(self, *_: Any, **kw: Any) -> None:
            self.steps += 1

    begins = Begins()
    trainer = make(
        Uncounted, Net(), rows(24), max_steps=3, gradient_accumulation_steps=2,
        callbacks=[begins], parts={"data_collator": lambda _: Unreadable(labels=1)},
    )  # fmt: skip
    with pytest.raises(OSError, match="no such shard"):
        trainer.train()
    assert trainer.state.global_step == begins.steps == 0


# What the type is


def test_init_has_the_parameters_of_transformers() -> None:
    ours = inspect.signature(ctrainer.Trainer.__init__).parameters
    theirs = inspect.signature(transformers.Trainer.__init__).parameters
    assert list(ours) == list(theirs)
    assert len(ours) == 14
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default
        assert ours[name].kind == parameter.kind


# metrics_format is a function there that takes the trainer for its metrics.
PUBLIC = [
    name
    for name in dir(transformers.Trainer)
    if not name.startswith("_")
    and callable(getattr(transformers.Trainer, name))
    and name != "metrics_format"
]


# Parameters of releases before 5, behind those of 5.
OLDER = {"set_initial_training_values": ["total_train_batch_size"]}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_methods_take_the_parameters_of_transformers(name: str) -> None:
    args = arguments(transformers.TrainingArguments)
    theirs = inspect.signature(getattr(transformers.Trainer(Net(), args), name))
    ours = inspect.signature(getattr(ctrainer.Trainer(Net(), args), name))
    assert list(ours.parameters) == [*theirs.parameters, *OLDER.get(name, ())]
    for key, parameter in theirs.parameters.items():
        assert ours.parameters[key].kind == parameter.kind
        if parameter.default is not parameter.empty:
            assert ours.parameters[key].default == parameter.default


def test_attributes_live_in_the_instance() -> None:
    trainer = make(ctrainer.Trainer, Net(), rows())
    assert vars(trainer)["model"] is trainer.model
    assert {"args", "state", "control", "optimizer", "callback_handler"} <= set(
        vars(trainer)
    )
    reference = transformers.Trainer(Net(), arguments(transformers.TrainingArguments))
    public = {n for n in vars(reference) if not n.startswith("_")}
    made_when_asked = {"accelerator", "gather_function"}  # a property and a method
    assert public - made_when_asked <= set(vars(trainer))
    assert callable(trainer.gather_function)


def test_the_class_pickles_by_name() -> None:
    assert pickle.loads(pickle.dumps(ctrainer.Trainer)) is ctrainer.Trainer
    assert ctrainer.Trainer.__module__ == "ctrainer.trainer"


def test_weak_references_and_cycles_are_collected() -> None:
    trainer = train(ctrainer.Trainer)
    trainer.myself = trainer
    trainer.compute_loss = functools.partial(trainer.compute_loss)
    gone = weakref.ref(trainer)
    model = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert gone() is None
    assert model() is None


@pytest.mark.parametrize("max_steps", [1, 4])
def test_a_loader_goes_with_the_trainer(max_steps: int) -> None:
    """Also one that is left in the middle of an epoch; its workers would stay."""
    seen = []

    class Given(ctrainer.Trainer):
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            seen.append(weakref.ref(loader))
            return loader

    train(Given, max_steps=max_steps)
    gc.collect()
    assert [gone() for gone in seen] == [None]


def test_the_tokenizer_of_older_releases_is_the_processing_class() -> None:
    trainer = ctrainer.Trainer(Net(), arguments(), tokenizer="tokenizer")
    assert trainer.processing_class == trainer.tokenizer == "tokenizer"


def test_an_interruption_while_a_hook_is_looked_at_goes_on() -> None:
    class Hook:
        def __init__(self, stop: type[BaseException]) -> None:
            self.stop = stop

        def __hash__(self) -> int:
            raise self.stop

        def __call__(self, model: Any, inputs: Any) -> Any:
            return model(**inputs)["loss"]

    trainer = make(ctrainer.Trainer, Net(), rows(24), max_steps=1)
    trainer.compute_loss = Hook(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer = make(ctrainer.Trainer, Net(), rows(24), max_steps=1)
    trainer.compute_loss = Hook(TypeError)  # no more than unhashable
    assert trainer.train().global_step == 1
