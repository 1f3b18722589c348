"""Trainer: hyper-parameter search, run by optuna, ray or wandb through transformers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ctrainer.arguments.checks import as_its_type
from ctrainer.arguments.settings import nearest
from ctrainer.integrations import search_backend
from ctrainer.runtime.fork import temporary_folder
from ctrainer.trainer import checkpoint
from ctrainer.training_args import TrainingArguments

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")


def hyperparameter_search(
    trainer: TrainerRun,
    hp_space: Callable[..., dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    n_trials: int = 20,
    direction: str | list[str] = "minimize",
    backend: Any = None,
    hp_name: Callable[..., str] | None = None,
    **kwargs: Any,
) -> Any:
    """Return the best of n_trials trainings, each with a fresh model of model_init.

    The search is optuna's, ray's or wandb's, driven by transformers' backend of
    that name. On several ranks the first one asks it; the others receive each
    trial, train along and return None.

    Args:
        hp_space (Callable[..., dict[str, Any]] | None, default None): (trial) ->
            values by the arguments' names; None: the backend's own space.
        compute_objective (Callable[[dict[str, float]], Any] | None, default None):
            (metrics) -> what is optimized; None: the loss, or else the sum of the
            metrics.
        n_trials (int, default 20): Trainings.
        direction (str | list[str], default 'minimize'): "minimize" or "maximize"; a
            list of them for several objectives.
        backend (default None): Its name; None: the first that is installed.
        hp_name (Callable[..., str] | None, default None): (trial) -> name of a
            trial's run.
        **kwargs: Of the backend.

    Raises:
        RuntimeError: there is no model_init.
        ImportError: transformers or the backend is missing.
    """
    if trainer.model_init is None:
        raise RuntimeError(
            "hyperparameter_search trains a fresh model each time: pass model_init "
            "instead of model"
        )
    kind, search, default_objective = search_backend(backend)
    trainer.hp_search_backend = kind
    trainer.hp_space = hp_space or search.default_hp_space
    trainer.hp_name = hp_name
    trainer.compute_objective = compute_objective or default_objective
    try:
        if trainer.args.world_size == 1:
            return search.run(trainer, n_trials, direction, **kwargs)
        if trainer.args.process_index > 0:
            return follow_search(trainer)
        return lead_search(trainer, search, n_trials, direction, kwargs)
    finally:
        trainer.hp_search_backend = None


def lead_search(
    trainer: TrainerRun,
    search: Any,
    n_trials: int,
    direction: Any,
    options: dict[str, Any],
) -> Any:
    end = "it failed on rank 0, whose own error says why"
    # In place of accelerate's object, whose making would wait for all ranks.
    lead = _Lead(trainer, accelerator=SimpleNamespace(clear=lambda: None))
    try:
        best = search.run(lead, n_trials, direction, **options)
        end = ""
    finally:
        send(trainer, {"end": end})
    return best


def send(trainer: TrainerRun, message: dict[str, Any]) -> None:
    text = json.dumps(message, default=lambda number: number.item())
    trainer._communicator.broadcast_bytes(text.encode(), 0)


def follow_search(trainer: TrainerRun) -> None:
    """Train along with every trial that rank 0 sends. RuntimeError when the search
    fails there."""
    while "end" not in (message := receive(trainer)):
        trainer.objective = None
        with contextlib.suppress(_pruned()):
            trainer.train(trial=_trial_of(message))
            if trainer.objective is None:
                trainer.evaluate()
    if message["end"]:
        raise RuntimeError(f"hyperparameter_search: {message['end']}")


def receive(trainer: TrainerRun) -> Any:
    """What rank 0 sends. Each train() may leave the group, and the next joins anew."""
    return json.loads(trainer._communicator.broadcast_bytes(None, 0))


def hp_search_setup(trainer: TrainerRun, trial: Any) -> None:
    """Set the trial's values in args, each as the type that it had."""
    trainer._trial = trial
    if trial is None or trainer.hp_search_backend is None:
        return
    values = trial if trainer.hp_search_backend != "optuna" else trainer.hp_space(trial)
    for name, value in dict(values).items():
        if name == "wandb":  # ray passes its own settings along
            continue
        if not hasattr(trainer.args, name):
            text = "hp_space sets %s, which no argument is called; %s"
            logger.warning(text, name, nearest(name, vars(trainer.args)))
            continue
        value = as_its_type(trainer.args, TrainingArguments, name, value)
        setattr(trainer.args, name, value)
    trainer._train_batch_size = trainer.args.train_batch_size


def report_to_hp_search(
    trainer: TrainerRun, trial: Any, step: int, metrics: dict[str, float]
) -> None:
    """Report an evaluation to the search; it may prune the trial."""
    if trial is None or trainer.hp_search_backend is None:
        return
    trainer.objective = trainer.compute_objective(dict(metrics))
    if trainer.hp_search_backend == "optuna":
        answers = trainer._together("pruning", lambda: prunes(trainer, trial, step))
        if answers[0]:
            raise _pruned()
    elif trainer.hp_search_backend == "ray":
        import ray.tune

        saved = None
        with temporary_folder() as folder:
            if trainer.control.should_save:
                trainer._tune_save_checkpoint(folder)
                saved = ray.tune.Checkpoint.from_directory(folder)
            values = {**metrics, "objective": trainer.objective}
            ray.tune.report(values, checkpoint=saved)


def tune_save_checkpoint(trainer: TrainerRun, checkpoint_dir: str) -> None:
    """Save checkpoint-N in a folder for Ray, which continues trials from it. Hook."""
    args, state = trainer.args, trainer.state
    own = args.output_dir, args.push_to_hub, state.best_model_checkpoint
    args.output_dir, args.push_to_hub = checkpoint_dir, False
    try:
        checkpoint.save_checkpoint(trainer, trainer.model)
    finally:
        args.output_dir, args.push_to_hub, state.best_model_checkpoint = own


def run_name(trainer: TrainerRun, trial: Any) -> str:
    """The name of a trial's run."""
    name = trainer.hp_name
    return str(name(trial)) if name else f"run-{_number(trainer, trial)}"


def _number(trainer: TrainerRun, trial: Any) -> Any:
    """What distinguishes a trial from the others of its search."""
    if hasattr(trial, "number"):  # optuna's, and any where another rank leads
        return trial.number
    if trainer.hp_search_backend == "ray":
        import ray.tune

        return ray.tune.get_context().get_trial_id()
    import wandb

    return wandb.run.id


def prunes(trainer: TrainerRun, trial: Any, step: int) -> bytes:
    """Does optuna end the trial here? Only the rank that leads the search knows."""
    if not hasattr(trial, "study") or trial.study._is_multi_objective():
        return b""
    trial.report(trainer.objective, step)
    return b"yes" if trial.should_prune() else b""


def _trial_of(message: dict[str, Any]) -> Any:
    """The trial that rank 0 trains: optuna's, or its values."""
    if "study" not in message:
        return _Values(message)
    import optuna

    return optuna.trial.FixedTrial(message["values"], message["number"])


def _pruned() -> Any:
    """The exception that ends a trial; optuna alone prunes."""
    try:
        import optuna
    except ImportError:
        return ()
    return optuna.TrialPruned


class _Values(dict[str, Any]):
    """A trial's values, with its number."""

    def __init__(self, message: Any) -> None:
        super().__init__(message["values"])
        self.number = message["number"]


class _View:
    """Attributes in front of those of another object."""

    def __init__(self, other: Any, **own: Any) -> None:
        vars(self).update(own, _other=other)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_other"], name)


class _Lead(_View):
    """The trainer as rank 0's search sees it: alone, each train() one of all ranks.

    transformers' own way to reach the others needs torch.distributed.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._other, name, value)

    @property
    def args(self) -> Any:
        return _View(self._other.args, world_size=1, process_index=0)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> Any:
        sent = {"number": _number(self._other, trial)}
        if hasattr(trial, "study"):
            self._other.hp_space(trial)  # asks for the values
            sent |= {"values": trial.params, "study": True}
        else:
            sent["values"] = dict(trial)
        send(self._other, sent)
        return self._other.train(resume_from_checkpoint, trial=trial)
