"""The state of a run and the flags that steer it, as they are stored and passed on."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ctrainer.checkpoint.files import read_object
from ctrainer.checkpoint.schema import TRAINER_STATE, check_fields

logger = logging.getLogger(__name__)


class ExportableState:
    """An object whose state is kept in trainer_state.json.

    Example:
        >>> from ctrainer import EarlyStoppingCallback
        >>> kept = EarlyStoppingCallback(early_stopping_patience=2).state()
        >>> EarlyStoppingCallback.from_state(kept).early_stopping_patience
        2
    """

    def state(self) -> dict[str, Any]:
        """Return {"args": constructor keywords, "attributes": what to set on the new
        object}, of values that JSON can hold."""
        raise NotImplementedError(
            f"{type(self).__name__} is to be saved, so it must define state()"
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Any:
        """Return a new object of what state() returned.

        Args:
            state (dict[str, Any]): "args" and "attributes".
        """
        made = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(made, name, value)
        return made


def is_exportable(callback: Any) -> bool:
    """Has it a state to keep, as an ExportableState of ours or transformers' has?"""
    kind = type(callback)
    return callable(getattr(kind, "state", None)) and callable(
        getattr(kind, "from_state", None)
    )


@dataclass
class TrainerControl(ExportableState):
    """Flags that callbacks raise and the loop acts on and lowers.

    Args:
        should_training_stop (bool, default False): End the run after this update.
        should_epoch_stop (bool, default False): End the epoch after this update.
        should_save (bool, default False): Take a checkpoint.
        should_evaluate (bool, default False): Evaluate.
        should_log (bool, default False): Log.

    Example:
        >>> from ctrainer import TrainerControl
        >>> TrainerControl(should_save=True).should_log
        False
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        """Return the flags under "args"."""
        return {"args": asdict(self), "attributes": {}}


@dataclass
class TrainerState:
    """How far a run is. Stored as trainer_state.json, which transformers reads too.

    Args:
        epoch (float, default 0): Epochs done, with a fraction.
        global_step (int, default 0): Updates of the weights done.
        max_steps (int, default 0): Updates of the run.
        logging_steps (float, default 500): Updates between logs.
        eval_steps (float, default 500): Updates between evaluations.
        save_steps (float, default 500): Updates between checkpoints.
        train_batch_size (int | None, default None): Rows in a micro-batch.
        num_train_epochs (int, default 0): Epochs of the run, rounded up.
        num_input_tokens_seen (int, default 0): Tokens of all batches so far, where they
            are counted.
        total_flos (float, default 0): Floating-point operations so far, as the model
            estimates them.
        log_history (list[dict[str, Any]]): Every log of the run; None: an empty list.
        best_metric (float | None, default None): The best value of
            metric_for_best_model so far.
        best_global_step (int | None, default None): The update of that value.
        best_model_checkpoint (str | None, default None): The folder of that update.
        is_local_process_zero (bool, default True): This is the first process of its
            machine.
        is_world_process_zero (bool, default True): This is the first process of the
            run.
        is_hyper_param_search (bool, default False): The run is a trial of a search.
        trial_name (str | None, default None): Name of the trial.
        trial_params (dict[str, Any] | None, default None): Values that the trial tries.
        stateful_callbacks (default None): Callbacks with a state, or their saved states
            by name.

    Source: transformers 5.17, trainer_callback.py.

    Example:
        >>> from ctrainer import TrainerState
        >>> TrainerState(global_step=3).save_to_json("trainer_state.json")
        >>> TrainerState.load_from_json("trainer_state.json").global_step
        3
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 500
    eval_steps: float = 500
    save_steps: float = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default=None)  # type: ignore[arg-type]
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: Any = None

    # Of one train(), not stored: no fields, so that transformers reads what is.
    samples_done = 0  # rows that this rank has trained on
    resumed_at = 0  # global_step at the begin
    resumed_flos = 0.0  # total_flos at the begin
    resumed_from = ""  # folder of the checkpoint

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = _export(self.stateful_callbacks or [])

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write the state as a whole or not at all.

        Args:
            json_path (str | os.PathLike[str]): The file, which is replaced.
        """
        text = json.dumps(asdict(self), indent=2, sort_keys=True, default=_plain)
        temporary = f"{os.fspath(json_path)}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, json_path)

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> TrainerState:
        """Return the state of a file; keys of other releases that are not known here
        are left out.

        Args:
            json_path (str | os.PathLike[str]): The file.

        Raises:
            ValueError: the file is not a state; the message names file and field.
        """
        content = read_object(json_path)
        check_fields(json_path, content, TRAINER_STATE)
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(content) - known)
        if unknown:
            logger.warning("%s: unknown %s left out", json_path, ", ".join(unknown))
        return cls(**{k: v for k, v in content.items() if k in known})

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Turn periods that are parts of the run (below 1) into updates.

        logging_steps, eval_steps and save_steps are put here; `args` stay as given.

        Args:
            args (TrainingArguments): The run's.
            max_steps (int): Updates of the run.
        """
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, name)
            if steps is not None:
                steps = math.ceil(max_steps * steps) if steps < 1 else steps
                setattr(self, name, steps)

    def init_training_references(
        self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any
    ) -> None:
        """Take over what a run knows at its start.

        Args:
            trainer: For the name of the trial and for this process's place.
            max_steps (int): Updates of the run.
            num_train_epochs (int): Epochs of the run.
            trial: Of a search, an Optuna trial or a dict; else None.
        """
        if getattr(trainer, "hp_name", None) is not None:
            current = getattr(trainer, "_trial", None)
            if current is not None:
                self.trial_name = trainer.hp_name(current)
        self.trial_params = None if trial is None else _trial_params(trial)
        self.resumed_at, self.resumed_flos = self.global_step, self.total_flos
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def _export(callbacks: list[Any]) -> dict[str, Any]:
    """Class name to state; a list of states where a class occurs more than once."""
    exported: dict[str, Any] = {}
    for callback in callbacks:
        if not is_exportable(callback):
            raise TypeError(
                f"{type(callback).__name__} is to be saved, so it must define state() "
                "and from_state() (see ExportableState)"
            )
        exported.setdefault(type(callback).__name__, []).append(callback.state())
    return {k: v[0] if len(v) == 1 else v for k, v in exported.items()}


def _plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's."""
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        return value.item()
    raise TypeError(
        f"trainer_state.json cannot hold a {type(value).__name__}: log plain numbers"
    )


def _trial_params(trial: Any) -> dict[str, Any]:
    """Hyperparameters of an optuna trial, or of ray's and others' plain dict."""
    return dict(getattr(trial, "params", trial))
