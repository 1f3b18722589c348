"""Callbacks: the events of a run, its state, and the flags that steer it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ctrainer import _C
from ctrainer.arguments.settings import read
from ctrainer.runtime import messages
from ctrainer.trainer_state import ExportableState, TrainerControl, TrainerState

if TYPE_CHECKING:
    from ctrainer.training_args import TrainingArguments

__all__ = [
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "PrinterCallback",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
]

logger = logging.getLogger(__name__)

Result = TrainerControl | None


class TrainerCallback:
    """Methods called at the events of a run; override those that you need.

    Keywords that a method does not name or take as **kwargs are left out, and one that
    names `tokenizer` gets the processing class by that name.

    Args of every method:
        args (TrainingArguments): The run's.
        state (TrainerState): How far the run is.
        control (TrainerControl): Flags that the loop acts on.
        **kwargs: model, processing_class, optimizer, lr_scheduler, train_dataloader,
            eval_dataloader, and what an event adds: `metrics` or `logs`.

    Returns of every method:
        A control that replaces the trainer's, or None, which leaves it.

    Source: transformers 5.17, trainer_callback.py.

    Example:
        >>> from ctrainer import TrainerCallback, TrainerControl, TrainerState
        >>> class StopAtTen(TrainerCallback):
        ...     def on_step_end(self, args, state, control, **kwargs):
        ...         control.should_training_stop = state.global_step >= 10
        >>> control = TrainerControl()
        >>> StopAtTen().on_step_end(None, TrainerState(global_step=10), control)
        >>> control.should_training_stop
        True
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """The trainer has been constructed."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """train() begins, before its first epoch."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """An epoch begins."""

    def on_step_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """An update begins, before its first micro-batch."""

    def on_substep_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """A micro-batch of an update, other than its last, is done."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """Gradients are complete and clipped; the optimizer has not run."""

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """The optimizer has run; the gradients are still there."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """An update is counted; on_log, on_evaluate and on_save follow where due."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """Numbers have been logged; `logs` has them."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """An evaluation is done; `metrics` has its results."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """A checkpoint has been taken."""

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """An epoch has ended; on_log, on_evaluate and on_save follow where due."""

    def on_train_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """train() ends, after its last epoch."""

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """A batch of an evaluation or a prediction is done."""

    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any
    ) -> Result:
        """predict() is done.

        Args:
            metrics (dict): Its results by name.
        """

    def on_push_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """The model is about to be pushed to the Hub."""


def _is_multiple(step: int, period: float | None) -> bool:
    return bool(period) and period > 0 and step % period == 0  # type: ignore[operator]


def _logs(args: Any, state: Any, step: int) -> bool:
    by_steps = args.logging_strategy == "steps"
    return (by_steps and _is_multiple(step, state.logging_steps)) or bool(
        step == 1 and args.logging_first_step
    )


def _evaluates_last(args: Any, state: Any) -> bool:
    """Is the last step evaluated, whatever the period? Of transformers' own arguments
    its release decides: 4.57 does not, 5.17 does."""
    theirs = sys.modules.get("transformers.training_args")
    if not isinstance(args, getattr(theirs, "TrainingArguments", ())):
        return True
    control = TrainerControl()
    callback = sys.modules["transformers"].DefaultFlowCallback()
    callback.on_step_end(args, state, control)
    return control.should_evaluate


def is_log_due(args: Any, state: Any, epoch_ends: bool) -> bool:
    """Will DefaultFlowCallback log after the update that has begun, or after the epoch
    if that ends with it?"""
    at_its_end = bool(epoch_ends) and args.logging_strategy == "epoch"
    return at_its_end or _logs(args, state, state.global_step + 1)


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates, saves and stops when the arguments say so.

    Args of every method:
        args (TrainingArguments): The run's, with the strategies and periods.
        state (TrainerState): How far the run is.
        control (TrainerControl): Flags that are raised here.
        **kwargs: Not read.

    Returns of every method:
        The control.

    Example:
        >>> from ctrainer import DefaultFlowCallback, TrainerControl, TrainerState
        >>> from ctrainer import TrainingArguments
        >>> args = TrainingArguments(save_steps=2)
        >>> state = TrainerState(global_step=2, max_steps=4, save_steps=2)
        >>> DefaultFlowCallback().on_step_end(args, state, TrainerControl()).should_save
        True
    """

    _saved_at: float | None = None  # when the last save was asked for

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self._saved_at = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """By steps, the last step is saved, whatever the period, and evaluated unless
        args are those of a transformers that does not."""
        step = state.global_step
        last = step >= state.max_steps
        if _logs(args, state, step):
            control.should_log = True
        if args.eval_strategy == "steps":
            due = _is_multiple(step, state.eval_steps)
            due = due or (last and _evaluates_last(args, state))
            if due and (args.eval_delay or 0) <= step:
                control.should_evaluate = True
        if args.save_strategy == "steps":
            if last or _is_multiple(step, state.save_steps):
                control.should_save = True
        minutes = getattr(args, "save_minutes", None)
        if minutes and self._saved_at is not None:
            now = time.monotonic()
            if now - self._saved_at >= 60.0 * minutes:
                control.should_save = True
            if control.should_save:
                self._saved_at = now
        if last:
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and (args.eval_delay or 0) <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control


class PrinterCallback(TrainerCallback):
    """Prints each log as a dict.

    Example:
        >>> from ctrainer import PrinterCallback, TrainerState
        >>> PrinterCallback().on_log(None, TrainerState(), None, logs={"loss": 0.5})
        {'loss': '0.5'}
    """

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Print the log on the first rank of each machine.

        Args:
            args, control: Not read.
            state: The run's state; is_local_process_zero decides.
            logs (default None): Numbers by name; total_flos is left out.
            **kwargs: Not read.
        """
        if state.is_local_process_zero and logs is not None:
            print({k: _short(v) for k, v in logs.items() if k != "total_flos"})


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops when the metric has not improved for some evaluations.

    The metric is `metric_for_best_model`. The count goes into the checkpoint and comes
    back on resuming.

    Args:
        early_stopping_patience (int, default 1): Evaluations without improvement after
            which training stops.
        early_stopping_threshold (float | None, default 0.0): What an improvement has to
            exceed; None: 0.

    Raises:
        ValueError: a value of another type; when training begins, no metric or no
            evaluations.

    Example:
        >>> from ctrainer import EarlyStoppingCallback
        >>> EarlyStoppingCallback(early_stopping_patience=3).early_stopping_patience
        3
    """

    def __init__(
        self,
        early_stopping_patience: int = 1,
        early_stopping_threshold: float | None = 0.0,
    ) -> None:
        self.early_stopping_patience = read(
            early_stopping_patience, int, "early_stopping_patience"
        )
        self.early_stopping_threshold = read(
            early_stopping_threshold, float | None, "early_stopping_threshold"
        )
        self.early_stopping_patience_counter = 0

    def check_metric_value(
        self, args: TrainingArguments, state: Any, control: Any, metric_value: float
    ) -> None:
        """Count `metric_value` against the best so far; NaN counts as no better.

        Args:
            args (TrainingArguments): The run's; greater_is_better says in which
                direction.
            state: The run's, with best_metric.
            control: Not read.
            metric_value (float): The metric of this evaluation.
        """
        best = state.best_metric
        gain = 0.0 if best is None else metric_value - best
        if not args.greater_is_better:
            gain = -gain
        if best is None or gain > max(self.early_stopping_threshold or 0.0, 0.0):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Check that there is a metric and that there are evaluations.

        Args:
            args: The run's.
            state, control, **kwargs: Not read.

        Raises:
            ValueError: metric_for_best_model is None, or eval_strategy is "no".
        """
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True: the last "
                "model is kept, not the best."
            )
        if args.metric_for_best_model is None:
            raise ValueError(
                "EarlyStoppingCallback needs metric_for_best_model, which is None; "
                'set it, for example to "loss"'
            )
        if args.eval_strategy == "no":
            raise ValueError(
                'EarlyStoppingCallback needs evaluations, but eval_strategy is "no"; '
                'set it to "steps" or "epoch"'
            )

    def on_evaluate(  # type: ignore[override]
        self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any
    ) -> None:
        """Count the evaluation, and stop the run when patience is at its end.

        Args:
            args: The run's, with metric_for_best_model.
            state: The run's, with best_metric.
            control: Its should_training_stop is raised.
            metrics (dict): Results of the evaluation; without the metric nothing is
                counted, with a warning.
            **kwargs: Not read.
        """
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = metrics.get(name)
        if value is None:
            logger.warning(
                "EarlyStoppingCallback: no %s among the metrics (%s), nothing counted.",
                name,
                ", ".join(sorted(metrics)),
            )
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Return patience and threshold under "args", the count under "attributes"."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {
                "early_stopping_patience_counter": self.early_stopping_patience_counter,
            },
        }


class EmptyCacheCallback(TrainerCallback):
    """Gives the device's unused memory back every so many steps."""

    def __init__(self, empty_cache: Callable[[], None], every: int) -> None:
        self.empty_cache = empty_cache
        self.every = every

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.empty_cache()


class CallbackHandler(_C.CallbackHandler):
    """The callbacks of a trainer. Events are fired in C; this adds and removes.

    Args:
        callbacks (Iterable[Any]): Instances, or classes to instantiate, in the order in
            which they are called.
        model: Passed to the callbacks, as the following are.
        processing_class: Tokenizer, image processor or the like.
        optimizer: The run's.
        lr_scheduler: The run's.

    Args of events:
        event (str): Name of the method that is called.
        args (TrainingArguments): The run's.
        state (TrainerState): How far the run is.
        control (TrainerControl): Flags that the loop acts on.
        *args_, **kwargs: What an event adds, such as metrics or logs.

    Example:
        >>> from ctrainer.callbacks import CallbackHandler, DefaultFlowCallback
        >>> CallbackHandler([DefaultFlowCallback], None, None, None, None).callback_list
        'DefaultFlowCallback'
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any,
        processing_class: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> None:
        super().__init__([], model, processing_class, optimizer, lr_scheduler)
        for callback in callbacks:
            self.add_callback(callback)
        if not any(_is_a(cb, "DefaultFlowCallback") for cb in self.callbacks):
            logger.warning(
                "No DefaultFlowCallback among the callbacks (%s): nothing will log, "
                "evaluate, save or stop unless one of them does.",
                self.callback_list.replace("\n", ", "),
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Every event goes through a call_event that is assigned, as
        in transformers: setfit's gives callbacks a model of its own."""
        super().__setattr__(name, value)
        if name == "call_event":
            for event in _EVENTS:
                super().__setattr__(event, partial(_fired, self, event))

    def add_callback(self, callback: Any) -> None:
        """Append a callback; one of a class that is there is added with a warning.

        A display (transformers' progress bar, notebook table or printer, or a subclass
        of ours) takes the place of the display that was there.

        Args:
            callback: An instance, or a class to instantiate.

        Raises:
            TypeError: it has none of a callback's methods.
        """
        added = callback() if isinstance(callback, type) else callback
        if not any(hasattr(added, name) for name in _EVENTS):
            raise TypeError(
                f"callbacks has {callback!r}, without a method for any event; pass a "
                "TrainerCallback, with on_log(self, args, state, control, logs=None, "
                "**kwargs) for example"
            )
        if type(added) in [type(cb) for cb in self.callbacks]:
            messages.added_twice(type(added), self.callback_list)
        elif is_display(added):
            self.callbacks[:] = [cb for cb in self.callbacks if not _is_own(cb)]
        self.callbacks.append(added)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return the first callback that is, or is an instance of, what is
        given; None when there is none.

        Args:
            callback: An instance or a class.
        """
        for i, cb in enumerate(self.callbacks):
            if _matches(cb, callback):
                return self.callbacks.pop(i)
        return None

    def remove_callback(self, callback: Any) -> None:
        """Remove the first callback that is, or is an instance of, what is given.

        Args:
            callback: An instance or a class.

        Raises:
            ValueError: an instance that is not there.
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(
                f"{type(callback).__name__} is not among the callbacks: "
                + self.callback_list.replace("\n", ", ")
            )

    @property
    def callback_list(self) -> str:
        """Names of the callbacks' classes, one a line."""
        return "\n".join(type(cb).__name__ for cb in self.callbacks)


def like_transformers(cls: type) -> type:
    """The class, where transformers is loaded a subclass of that of the same name
    there, too, for isinstance()."""
    loaded = sys.modules.get("transformers.trainer_callback")
    theirs = getattr(loaded, cls.__name__, None)
    if cls.__module__ != __name__ or not isinstance(theirs, type):
        return cls
    return _joined(cls, theirs)


@cache
def _joined(cls: type, theirs: type) -> type:
    names = {"__module__": __name__, "__reduce__": _reduced}
    return type(cls.__name__, (cls, theirs), names)


def _reduced(callback: Any) -> tuple[Any, ...]:
    return _made_again, (type(callback).__mro__[1],), vars(callback)


def _made_again(cls: type) -> Any:
    found: Any = like_transformers(cls)
    return found.__new__(found)


_EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
# Flags that an event sets to False, and the keyword of what else it gets.
_LOWERED = {
    "on_train_begin": ["should_training_stop"],
    "on_epoch_begin": ["should_epoch_stop"],
    "on_step_begin": ["should_log", "should_evaluate", "should_save"],
    "on_log": ["should_log"],
    "on_evaluate": ["should_evaluate"],
    "on_save": ["should_save"],
}
_ADDED = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}


def _fired(
    handler: CallbackHandler, event: str, args: Any, state: Any, control: Any,
    *added: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """What the handler's own method of this event does, through its call_event."""
    for flag in _LOWERED.get(event, ()):
        setattr(control, flag, False)
    if added:
        (kwargs[_ADDED[event]],) = added
    return handler.call_event(event, args, state, control, **kwargs)


_DISPLAYS = {"ProgressCallback", "NotebookProgressCallback", "PrinterCallback"}
_COUNTERPARTS = {"NotebookProgressCallback": "ProgressCallback"}


def listed(callbacks: Any) -> list[Any]:
    """The callbacks of a constructor's argument. Raises TypeError for no list."""
    if callbacks is not None and not isinstance(callbacks, Iterable):
        raise TypeError(
            f"callbacks must be a list, not a {type(callbacks).__name__}; pass "
            "callbacks=[...]"
        )
    return list(callbacks or ())


def _names(cls: type) -> set[str]:
    """Names of those classes in the MRO that are transformers' or ours."""
    roots = ("transformers", "ctrainer")
    return {c.__name__ for c in cls.__mro__ if c.__module__.split(".")[0] in roots}


def _is_a(callback: Any, name: str) -> bool:
    return name in _names(type(callback))


def is_display(callback: Any) -> bool:
    """Does it show how far the run is: transformers' or ours, or a subclass?"""
    return not _DISPLAYS.isdisjoint(_names(type(callback)))


def _is_own(callback: Any) -> bool:
    """Is it the display that the trainer put there?"""
    cls = type(callback)
    return cls.__module__.startswith("ctrainer.") and cls.__name__ in _DISPLAYS


def _matches(callback: Any, wanted: Any) -> bool:
    if not isinstance(wanted, type):
        return bool(callback == wanted)
    if isinstance(callback, wanted):
        return True
    foreign = wanted.__module__.split(".")[0] == "transformers"
    name = _COUNTERPARTS.get(wanted.__name__, wanted.__name__)
    return (
        foreign
        and type(callback).__module__.startswith("ctrainer.")
        and _is_a(callback, name)
    )
