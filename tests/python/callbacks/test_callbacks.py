"""Callbacks: who is called, with what, and what becomes of the control."""

import copy
import functools
import gc
import logging
import pickle
import sys
import weakref
from types import SimpleNamespace

import pytest

from ctrainer import _C, callbacks
from ctrainer.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    EmptyCacheCallback,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from ctrainer.display.progress import ProgressCallback
from ctrainer.runtime.events import is_empty

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


def handler_of(*callbacks: object) -> CallbackHandler:
    flow = DefaultFlowCallback()
    return CallbackHandler([flow, *callbacks], "model", "proc", "opt", "sched")


def fire(handler: CallbackHandler, event: str, *more: object, **kwargs: object):
    control = TrainerControl()
    return getattr(handler, event)(args_of(), TrainerState(), control, *more, **kwargs)


def args_of(**changed: object) -> SimpleNamespace:
    values = {
        "logging_strategy": "no",
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_first_step": False,
        "eval_delay": 0,
    }
    return SimpleNamespace(**{**values, **changed})


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_reaches_an_override_with_the_handlers_attributes(
    event: str,
) -> None:
    seen: list[dict[str, object]] = []

    def record(self, args, state, control, **kwargs):
        seen.append(kwargs)

    handler = handler_of(type("Recording", (TrainerCallback,), {event: record}))
    handler.train_dataloader = "train"
    extra = {"metrics": {}} if event in ("on_evaluate", "on_predict") else {}
    fire(handler, event, **extra)
    assert seen == [
        {
            "model": "model",
            "processing_class": "proc",
            "optimizer": "opt",
            "lr_scheduler": "sched",
            "train_dataloader": "train",
            "eval_dataloader": None,
            **extra,
        }
    ]


@pytest.mark.parametrize(
    ("event", "keyword"),
    [("on_log", "logs"), ("on_evaluate", "metrics"), ("on_predict", "metrics")],
)
def test_fourth_positional_argument_goes_by_its_name(event: str, keyword: str) -> None:
    seen = {}

    class Recording(TrainerCallback):
        def __getattribute__(self, name):
            if name == event:
                return lambda args, state, control, **kwargs: seen.update(kwargs)
            return super().__getattribute__(name)

    fire(handler_of(Recording()), event, {"loss": 1.0})
    assert seen[keyword] == {"loss": 1.0}


def test_other_events_reject_a_fourth_positional_argument() -> None:
    with pytest.raises(TypeError, match="on_save takes args, state and control"):
        fire(handler_of(), "on_save", {})


def test_events_go_through_a_call_event_that_is_assigned() -> None:
    seen = []

    def call_event(event, args, state, control, **rest):
        seen.append((event, control.should_log, rest))
        return control

    handler = CallbackHandler([DefaultFlowCallback], None, None, None, None)
    handler.call_event = call_event
    control = TrainerControl(should_log=True)
    assert handler.on_step_end(None, None, control) is control
    handler.on_log(None, None, control, {"loss": 1.0})
    assert seen == [
        ("on_step_end", True, {}),
        ("on_log", False, {"logs": {"loss": 1.0}}),
    ]


def test_an_assigned_call_event_lowers_the_flags_that_ours_does() -> None:
    flags = [name for name in vars(TrainerControl()) if name.startswith("should_")]
    for event in (name for name in dir(CallbackHandler) if name.startswith("on_")):
        left = []
        for assigned in (False, True):
            handler = CallbackHandler([DefaultFlowCallback], None, None, None, None)
            handler.callbacks.clear()
            if assigned:
                handler.call_event = handler.call_event
            control = TrainerControl(**dict.fromkeys(flags, True))
            getattr(handler, event)(None, None, control)
            left.append(vars(control))
        assert left[0] == left[1]


def test_call_event_passes_extra_keywords_and_an_extra_shadows_an_attribute() -> None:
    seen = {}

    class Recording(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.update(kwargs)

    handler = handler_of(Recording())
    control = TrainerControl()
    answer = handler.call_event(
        "on_train_begin", None, None, control, setfit_model="s", model="other"
    )
    assert answer is control
    assert (seen["setfit_model"], seen["model"]) == ("s", "other")
    assert len(seen) == 7


def test_a_method_gets_only_the_keywords_that_it_names() -> None:
    seen = []

    class Narrow(TrainerCallback):
        def on_log(self, args, state, control, logs, optimizer=None):
            seen.append((logs, optimizer))

    fire(handler_of(Narrow()), "on_log", {"loss": 2.0})
    assert seen == [({"loss": 2.0}, "opt")]


def test_a_method_that_names_tokenizer_gets_the_processing_class() -> None:
    seen = []

    class Of2021(TrainerCallback):
        def on_save(self, args, state, control, model=None, tokenizer=None, **kwargs):
            seen.append((model, tokenizer, kwargs["processing_class"]))

    fire(handler_of(Of2021()), "on_save")
    assert seen == [("model", "proc", "proc")]


def test_returned_control_replaces_and_none_keeps() -> None:
    new = TrainerControl(should_save=True)
    seen = []

    class Replacing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return new

    class Watching(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(control)

    state = TrainerState(max_steps=10)
    handler = handler_of(Replacing(), Watching())
    assert handler.on_step_end(args_of(), state, TrainerControl()) is new
    assert seen == [new]


def test_something_else_returned_is_a_type_error_naming_the_method() -> None:
    class Wrong(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            return True

    with pytest.raises(TypeError, match=r"Wrong\.on_save returned bool; return the"):
        fire(handler_of(Wrong()), "on_save")


def test_exception_of_a_callback_propagates() -> None:
    class Failing(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fire(handler_of(Failing()), "on_save")


@pytest.mark.parametrize("event", EVENTS)
def test_empty_methods_are_known_as_such(event: str) -> None:
    hf = pytest.importorskip("transformers").TrainerCallback
    assert is_empty(vars(TrainerCallback)[event])
    if hasattr(hf, event):
        assert is_empty(vars(hf)[event])


def test_methods_with_a_body_are_not_taken_for_empty() -> None:
    def returns_a_number():
        """Words."""
        return 5

    def returns_itself():
        return returns_itself

    async def waits():
        pass

    def yields():
        yield

    assert not any(
        map(is_empty, [returns_a_number, returns_itself, waits, yields, print])
    )


def test_an_empty_method_is_not_called() -> None:
    class Silent(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            pass

    calls = []
    silent = Silent()
    handler = handler_of(silent)
    previous = sys.getprofile()
    sys.setprofile(
        lambda frame, what, arg: (
            calls.append(frame.f_code.co_name) if what == "call" else None
        )
    )
    try:
        fire(handler, "on_step_begin")
        first = calls.count("on_step_begin")
    finally:
        sys.setprofile(previous)
    assert first == 0


def test_attribute_set_on_the_instance_or_the_class_wins_at_once() -> None:
    class Late(TrainerCallback):
        pass

    seen = []
    late = Late()
    handler = handler_of(late)
    fire(handler, "on_save")
    late.on_save = lambda args, state, control, **kw: seen.append("instance")
    fire(handler, "on_save")
    del late.on_save
    Late.on_save = lambda self, args, state, control, **kw: seen.append("class")
    fire(handler, "on_save")
    assert seen == ["instance", "class"]


def test_objects_that_are_no_subclass_and_other_callables_are_called() -> None:
    seen = []

    def on_save(who, args, state, control, model=None, **kwargs):
        seen.append((who, model))

    plain = SimpleNamespace(on_save=functools.partial(on_save, "partial"))
    fire(handler_of(plain), "on_save")
    fire(handler_of(plain), "on_log", {})  # it has no such method
    assert seen == [("partial", "model")]


def test_list_may_change_during_an_event() -> None:
    seen = []

    class Leaving(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            handler.remove_callback(self)
            handler.model = "new"

    class Staying(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            seen.append(model)

    handler = handler_of(Staying(), Leaving(), Staying(), Staying())
    fire(handler, "on_save")
    fire(handler, "on_save")
    # As with Python's list iterator, the one that takes the place of the removed one
    # is passed over in the event in which that happens.
    assert seen == ["model", "new", "new", "new", "new"]


@pytest.mark.parametrize(
    ("event", "lowered"),
    [
        ("on_train_begin", {"should_training_stop"}),
        ("on_epoch_begin", {"should_epoch_stop"}),
        ("on_step_begin", {"should_save", "should_evaluate", "should_log"}),
        ("on_evaluate", {"should_evaluate"}),
        ("on_save", {"should_save"}),
        ("on_log", {"should_log"}),
        ("on_optimizer_step", set()),
    ],
)
def test_flags_that_an_event_lowers(event: str, lowered: set[str]) -> None:
    control = TrainerControl(True, True, True, True, True)
    more = ({},) if event in ("on_evaluate", "on_log") else ()
    getattr(handler_of(), event)(args_of(), TrainerState(), control, *more)
    assert {name for name, value in vars(control).items() if not value} == lowered


def test_list_that_is_no_list_is_rejected() -> None:
    handler = handler_of()
    handler.callbacks = (1, 2)
    with pytest.raises(TypeError, match="callbacks must be a list"):
        fire(handler, "on_save")


def test_handler_in_a_cycle_is_freed_and_its_type_keeps_no_reference() -> None:
    class Referring(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            self.seen = kwargs

    def make() -> weakref.ref:
        callback = Referring()
        callback.handler = _C.CallbackHandler([callback], 1, 2, 3, 4)
        fire(callback.handler, "on_save", extra=callback.handler)
        return weakref.ref(callback)

    make()
    gc.collect()
    before = sys.getrefcount(_C.CallbackHandler)
    alive = [make() for _ in range(50)]
    gc.collect()
    after = sys.getrefcount(_C.CallbackHandler)
    assert not any(ref() for ref in alive)
    assert after == before


class TestAddAndRemove:
    def test_class_or_instance_pops_by_class_or_instance(self) -> None:
        handler = handler_of()
        handler.add_callback(PrinterCallback)
        printer = handler.callbacks[-1]
        assert handler.pop_callback(PrinterCallback) is printer
        assert handler.pop_callback(PrinterCallback) is None
        handler.add_callback(printer)
        assert handler.pop_callback(printer) is printer
        handler.remove_callback(PrinterCallback)
        with pytest.raises(ValueError, match="PrinterCallback is not among"):
            handler.remove_callback(printer)

    def test_transformers_class_finds_our_counterpart(self) -> None:
        hf = pytest.importorskip("transformers")
        handler = handler_of(EarlyStoppingCallback(), PrinterCallback())
        for name in ("PrinterCallback", "EarlyStoppingCallback", "DefaultFlowCallback"):
            assert type(handler.pop_callback(getattr(hf, name))).__name__ == name
        assert handler.callbacks == []

    def test_transformers_display_takes_the_place_of_ours(self) -> None:
        hf = pytest.importorskip("transformers")
        handler = handler_of(PrinterCallback())
        handler.add_callback(hf.ProgressCallback)
        assert handler.callback_list == "DefaultFlowCallback\nProgressCallback"
        assert isinstance(handler.callbacks[1], hf.ProgressCallback)

    def test_notebook_display_of_transformers_finds_ours(self) -> None:
        place = {"__module__": "transformers.utils.notebook"}
        theirs = type("NotebookProgressCallback", (TrainerCallback,), place)
        handler = handler_of(ProgressCallback())
        assert isinstance(handler.pop_callback(theirs), ProgressCallback)
        # Given by the user it takes the place of ours.
        handler.add_callback(ProgressCallback)
        handler.add_callback(theirs())
        assert handler.callback_list == "DefaultFlowCallback\nNotebookProgressCallback"

    def test_duplicate_and_missing_flow_are_told(self, caplog, monkeypatch) -> None:
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        caplog.set_level(logging.WARNING, "transformers")
        handler_of(DefaultFlowCallback())
        added = "You are adding a <class 'ctrainer.callbacks.DefaultFlowCallback'>"
        assert added in caplog.text
        CallbackHandler([PrinterCallback], None, None, None, None)
        assert "No DefaultFlowCallback among the callbacks (PrinterCallback)" in (
            caplog.text
        )

    def test_default_ones_are_transformers_too_and_can_be_copied(self) -> None:
        hf = pytest.importorskip("transformers")
        made = callbacks.like_transformers(DefaultFlowCallback)()
        assert isinstance(made, hf.DefaultFlowCallback)
        assert type(made) is callbacks.like_transformers(DefaultFlowCallback)
        made.note = 3
        for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(copied) is type(made)
            assert copied.note == 3

    def test_transformers_callbacks_run(self) -> None:
        hf = pytest.importorskip("transformers")
        early = hf.EarlyStoppingCallback(1)
        handler = handler_of(early)
        args = args_of(metric_for_best_model="loss", greater_is_better=False)
        state = TrainerState(best_metric=1.0)
        control = handler.on_evaluate(args, state, TrainerControl(), {"eval_loss": 2.0})
        assert control.should_training_stop
        assert early.early_stopping_patience_counter == 1


class TestDefaultFlow:
    """Against transformers' own, over whole runs."""

    @pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
    @pytest.mark.parametrize("every", [1, 3, 4.0, 100])
    @pytest.mark.parametrize("delay", [0, 2, 2.5])
    def test_same_flags_as_transformers(self, strategy, every, delay) -> None:
        hf = pytest.importorskip("transformers")
        args = args_of(
            logging_strategy=strategy,
            eval_strategy=strategy,
            save_strategy=strategy,
            logging_first_step=strategy == "no",
            eval_delay=delay,
        )
        for step in range(1, 9):
            state = TrainerState(
                epoch=step / 3,
                global_step=step,
                max_steps=7,
                logging_steps=every,
                eval_steps=every,
                save_steps=every,
            )
            for event in ("on_step_end", "on_epoch_end"):
                ours, theirs = TrainerControl(), TrainerControl()
                result = getattr(DefaultFlowCallback(), event)(
                    args, state, ours, model=1
                )
                getattr(hf.DefaultFlowCallback(), event)(args, state, theirs)
                assert ours == theirs
                assert result is ours

    @pytest.mark.parametrize("by_period_alone", [True, False])
    def test_the_release_of_transformers_arguments_evaluates_the_last_step_or_not(
        self, by_period_alone: bool, tmp_path, monkeypatch
    ) -> None:
        hf = pytest.importorskip("transformers")

        class Earlier(hf.DefaultFlowCallback):
            def on_step_end(self, args, state, control, **kwargs):
                """As in 4.57."""
                control.should_evaluate = state.global_step % state.eval_steps == 0

        if by_period_alone:
            monkeypatch.setattr(hf, "DefaultFlowCallback", Earlier)
        args = hf.TrainingArguments(str(tmp_path), eval_strategy="steps", use_cpu=True)
        evaluated = []
        for step in range(1, 8):
            state = TrainerState(global_step=step, max_steps=7, eval_steps=3)
            control = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
            evaluated += [step] * control.should_evaluate
        assert evaluated == ([3, 6] if by_period_alone else [3, 6, 7])

    def test_enumerations_are_understood(self) -> None:
        hf = pytest.importorskip("transformers.trainer_utils")
        args = args_of(logging_strategy=hf.IntervalStrategy.STEPS)
        state = TrainerState(global_step=2, logging_steps=2, max_steps=9)
        control = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
        assert control == TrainerControl(should_log=True)

    def test_missing_argument_names_itself(self) -> None:
        args = SimpleNamespace(logging_strategy="steps")
        with pytest.raises(AttributeError, match="eval_strategy"):
            DefaultFlowCallback().on_step_end(args, TrainerState(), TrainerControl())


class TestEarlyStopping:
    @staticmethod
    def count(values, greater=False, **kwargs) -> tuple[EarlyStoppingCallback, int]:
        stopper = EarlyStoppingCallback(**kwargs)
        args = SimpleNamespace(metric_for_best_model="m", greater_is_better=greater)
        state, control = TrainerState(), TrainerControl()
        for i, value in enumerate(values):
            stopper.on_evaluate(args, state, control, metrics={"eval_m": value})
            if control.should_training_stop:
                return stopper, i
            best = state.best_metric
            if best is None or (value > best if greater else value < best):
                state.best_metric = value
        return stopper, -1

    def test_stops_after_patience_without_gain(self) -> None:
        assert self.count([3.0, 2.0, 2.5, 2.4], early_stopping_patience=2)[1] == 3
        assert self.count([1.0, 2.0, 2.0], greater=True)[1] == 2

    def test_gain_must_exceed_the_threshold(self) -> None:
        assert self.count([3.0, 2.95], early_stopping_threshold=0.1)[1] == 1

    def test_nan_is_no_gain(self) -> None:
        assert self.count([3.0, float("nan")])[1] == 1

    def test_state_restores_the_count(self) -> None:
        stopper, _ = self.count([3.0, 4.0], early_stopping_patience=5)
        again = EarlyStoppingCallback.from_state(stopper.state())
        assert vars(again) == vars(stopper)
        assert again.early_stopping_patience_counter == 1

    def test_missing_metric_is_told_and_not_counted(self, caplog) -> None:
        stopper = EarlyStoppingCallback()
        args = SimpleNamespace(metric_for_best_model="f1", greater_is_better=True)
        stopper.on_evaluate(
            args, TrainerState(), TrainerControl(), metrics={"eval_a": 1}
        )
        assert "no eval_f1 among the metrics (eval_a)" in caplog.text
        assert stopper.early_stopping_patience_counter == 0

    def test_rejects_a_run_that_cannot_evaluate(self) -> None:
        args = SimpleNamespace(
            load_best_model_at_end=True, metric_for_best_model=None, eval_strategy="no"
        )
        with pytest.raises(ValueError, match="needs metric_for_best_model"):
            EarlyStoppingCallback().on_train_begin(args, None, None)
        args.metric_for_best_model = "loss"
        with pytest.raises(ValueError, match="needs evaluations"):
            EarlyStoppingCallback().on_train_begin(args, None, None)


def test_cache_is_emptied_every_so_many_steps() -> None:
    calls = []
    handler = handler_of(EmptyCacheCallback(lambda: calls.append(1), 3))
    for step in range(1, 8):
        state = TrainerState(global_step=step, max_steps=9)
        handler.on_step_end(args_of(), state, TrainerControl())
    assert len(calls) == 2
