"""Callbacks: the events of a run, its state, and the flags that steer it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ctrainer import _C
from ctrainer.arguments.settings import read
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

    Each gets `args`, `state` and `control` by position and by keyword `model`,
    `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader`,
    `eval_dataloader`; those that a method does not name or take as **kwargs are left
    out, and one that names `tokenizer` gets the processing class by that name. A
    returned control replaces the trainer's; None leaves it.

    Source: transformers 5.17, trainer_callback.py.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """The trainer has been constructed."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """Training begins."""

    def on_train_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """Training has ended."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """An epoch begins."""

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """An epoch has ended."""

    def on_step_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """An update begins, before its first micro-batch."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """Gradients are complete and clipped; the optimizer has not run."""

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """The optimizer has run; gradients are not yet dropped."""

    def on_substep_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """A micro-batch other than the last of an update is done."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """An update is done and counted."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """An evaluation is done; `metrics` has its results."""

    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any
    ) -> Result:
        """A prediction is done; `metrics` has its results."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """A checkpoint has been taken."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Result:
        """Numbers have been logged; `logs` has them."""

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Result:
        """A batch has been evaluated or predicted."""

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


def is_log_due(args: Any, state: Any, epoch_ends: bool) -> bool:
    """Will DefaultFlowCallback log after the update that has begun, or after the epoch
    if that ends with it?"""
    at_its_end = bool(epoch_ends) and args.logging_strategy == "epoch"
    return at_its_end or _logs(args, state, state.global_step + 1)


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates, saves and stops when the arguments say so."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """By steps, the last step is evaluated and saved, whatever the period."""
        step = state.global_step
        last = step >= state.max_steps
        if _logs(args, state, step):
            control.should_log = True
        if args.eval_strategy == "steps":
            due = last or _is_multiple(step, state.eval_steps)
            if due and (args.eval_delay or 0) <= step:
                control.should_evaluate = True
        if args.save_strategy == "steps":
            if last or _is_multiple(step, state.save_steps):
                control.should_save = True
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
    """Prints each log as a dict."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs is not None:
            print({k: _short(v) for k, v in logs.items() if k != "total_flos"})


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops when `metric_for_best_model` has not improved for `early_stopping_patience`
    evaluations by more than `early_stopping_threshold`.

    The count goes into the checkpoint and comes back on resuming. Raises ValueError
    when training begins without a metric or without evaluations.
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
        """Count `metric_value` against the best so far; NaN counts as no better."""
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
    """The callbacks of a trainer. Events are fired in C; this adds and removes."""

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

    def add_callback(self, callback: Any) -> None:
        """Append a callback, given as an instance or as a class to instantiate.

        A display (transformers' progress bar, notebook table or printer, or a
        subclass of ours) takes the place of the display that was there.
        """
        added = callback() if isinstance(callback, type) else callback
        if type(added) in [type(cb) for cb in self.callbacks]:
            logger.warning("A %s is among the callbacks already.", type(added).__name__)
        elif _is_display(added):
            self.callbacks[:] = [cb for cb in self.callbacks if not _is_own(cb)]
        self.callbacks.append(added)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return the first callback that is, or is an instance of, what is
        given; None when there is none."""
        for i, cb in enumerate(self.callbacks):
            if _matches(cb, callback):
                return self.callbacks.pop(i)
        return None

    def remove_callback(self, callback: Any) -> None:
        """Remove the first callback that is, or is an instance of, what is given.

        Raises ValueError when an instance is given that is not there.
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(
                f"{type(callback).__name__} is not among the callbacks: "
                + self.callback_list.replace("\n", ", ")
            )

    @property
    def callback_list(self) -> str:
        return "\n".join(type(cb).__name__ for cb in self.callbacks)


_DISPLAYS = {"ProgressCallback", "NotebookProgressCallback", "PrinterCallback"}
_COUNTERPARTS = {"NotebookProgressCallback": "ProgressCallback"}


def _names(cls: type) -> set[str]:
    """Names of those classes in the MRO that are transformers' or ours."""
    roots = ("transformers", "ctrainer")
    return {c.__name__ for c in cls.__mro__ if c.__module__.split(".")[0] in roots}


def _is_a(callback: Any, name: str) -> bool:
    return name in _names(type(callback))


def _is_display(callback: Any) -> bool:
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
