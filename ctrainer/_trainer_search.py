"""Trainer: hyper-parameter search, run by optuna, ray or wandb through transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ctrainer._trainer_base import TrainerBase
from ctrainer.integrations import search_backend

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
        that name. Raises RuntimeError without model_init, ImportError without
        transformers or the backend.
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
            return search.run(self, n_trials, direction, **kwargs)
        finally:
            self.hp_search_backend = None

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
                logger.warning("hp_space sets %s, which no argument is called", name)
                continue
            had = getattr(self.args, name)
            setattr(self.args, name, value if had is None else type(had)(value))
        self._train_batch_size = self.args.train_batch_size

    def _report_to_hp_search(
        self, trial: Any, step: int, metrics: dict[str, float]
    ) -> None:
        """Tell the search how an evaluation went; it may prune the trial."""
        if trial is None or self.hp_search_backend is None:
            return
        self.objective = self.compute_objective(dict(metrics))
        if self.hp_search_backend == "optuna" and hasattr(trial, "study"):
            import optuna

            if not trial.study._is_multi_objective():
                trial.report(self.objective, step)
                if trial.should_prune():
                    raise optuna.TrialPruned()
        elif self.hp_search_backend == "ray":
            import ray.tune

            ray.tune.report({**metrics, "objective": self.objective})
