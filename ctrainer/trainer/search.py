"""Trainer: hyper-parameter search, run by optuna, ray or wandb through transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from ctrainer.arguments.checks import as_its_type
from ctrainer.arguments.settings import nearest
from ctrainer.integrations import search_backend
from ctrainer.trainer.base import TrainerBase
from ctrainer.training_args import TrainingArguments

logger = logging.getLogger("ctrainer.trainer")


class SearchMixin(TrainerBase):
    """The hooks that transformers' search backends drive a trainer by."""

    hp_search_backend: Any
    hp_space: Callable[..., dict[str, Any]]
    hp_name: Callable[..., str] | None
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any

    def hyperparameter_search(
        self,
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
        trial, train along and return None. Raises RuntimeError without model_init,
        ImportError without transformers or the backend.
        """
        if self.model_init is None:
            raise RuntimeError(
                "hyperparameter_search trains a fresh model each time: pass model_init "
                "instead of model"
            )
        kind, search, default_objective = search_backend(backend)
        self.hp_search_backend = kind
        self.hp_space = hp_space or search.default_hp_space
        self.hp_name = hp_name
        self.compute_objective = compute_objective or default_objective
        try:
            if self.args.world_size == 1:
                return search.run(self, n_trials, direction, **kwargs)
            if self.args.process_index > 0:
                return self._follow_search()
            return self._lead_search(search, n_trials, direction, kwargs)
        finally:
            self.hp_search_backend = None

    def _lead_search(
        self, search: Any, n_trials: int, direction: Any, options: dict[str, Any]
    ) -> Any:
        end = "it failed on rank 0, whose own error says why"
        try:
            best = search.run(_Lead(self), n_trials, direction, **options)
            end = ""
        finally:
            self._send({"end": end})
        return best

    def _send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message, default=lambda number: number.item())
        self._communicator.broadcast_bytes(text.encode(), 0)

    def _follow_search(self) -> None:
        """Train along with every trial that rank 0 sends. RuntimeError when the search
        fails there."""
        message = self._receive()
        while "end" not in message:
            self.objective = None
            try:
                self.train(trial=_trial_of(message))
                if self.objective is None:
                    self.evaluate()
            except _pruned():
                pass
            message = self._receive()
        if message["end"]:
            raise RuntimeError(f"hyperparameter_search: {message['end']}")

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(
            self._communicator.broadcast_bytes(None, 0)
        )
        return message

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the trial's values in args, each as the type that it had."""
        self._trial = trial
        if trial is None or self.hp_search_backend is None:
            return
        values = trial if self.hp_search_backend != "optuna" else self.hp_space(trial)
        for name, value in dict(values).items():
            if name == "wandb":  # ray passes its own settings along
                continue
            if not hasattr(self.args, name):
                logger.warning(
                    "hp_space sets %s, which no argument is called; %s",
                    name,
                    nearest(name, vars(self.args)),
                )
                continue
            setattr(
                self.args, name, as_its_type(self.args, TrainingArguments, name, value)
            )
        self._train_batch_size = self.args.train_batch_size

    def _report_to_hp_search(
        self, trial: Any, step: int, metrics: dict[str, float]
    ) -> None:
        """Tell the search how an evaluation went; it may prune the trial."""
        if trial is None or self.hp_search_backend is None:
            return
        self.objective = self.compute_objective(dict(metrics))
        if self.hp_search_backend == "optuna":
            prunes = self._together("pruning", lambda: self._prunes(trial, step))
            if prunes[0]:
                raise _pruned()
        elif self.hp_search_backend == "ray":
            import ray.tune

            ray.tune.report({**metrics, "objective": self.objective})

    def _prunes(self, trial: Any, step: int) -> bytes:
        """Does optuna end the trial here? Only the rank that leads the search knows."""
        if not hasattr(trial, "study") or trial.study._is_multi_objective():
            return b""
        trial.report(self.objective, step)
        return b"yes" if trial.should_prune() else b""


def _trial_of(message: dict[str, Any]) -> Any:
    """The trial that rank 0 trains: optuna's, which has a number, or its values."""
    if "number" not in message:
        return message["values"]
    import optuna

    return optuna.trial.FixedTrial(message["values"], message["number"])


def _pruned() -> Any:
    """The exception that ends a trial; optuna alone prunes."""
    try:
        import optuna
    except ImportError:
        return ()
    return optuna.TrialPruned


class _Lead:
    """The trainer as rank 0's search sees it: alone, each train() one of all ranks.

    transformers' own way to reach the others needs torch.distributed.
    """

    def __init__(self, trainer: SearchMixin) -> None:
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_trainer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_trainer"], name, value)

    @property
    def args(self) -> Any:
        return _AloneArguments(self._trainer.args)

    @property
    def accelerator(self) -> Any:
        return _NothingToClear()

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> Any:
        if hasattr(trial, "study"):
            self._trainer.hp_space(trial)  # asks for the values
            sent = {"number": trial.number, "values": trial.params}
        else:
            sent = {"values": dict(trial)}
        self._trainer._send(sent)
        return self._trainer.train(resume_from_checkpoint, trial=trial)


class _AloneArguments:
    """Arguments of a run that has one process, so the search thinks."""

    world_size, process_index = 1, 0

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


class _NothingToClear:
    """In place of accelerate's object, whose making would wait for all ranks."""

    def clear(self) -> None:
        pass
