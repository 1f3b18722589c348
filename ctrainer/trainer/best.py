"""Trainer: which checkpoints are the best, by the metrics of their evaluations."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from os.path import realpath
from typing import TYPE_CHECKING, Any

from ctrainer.arguments.best import best_metrics
from ctrainer.checkpoint import PREFIX

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun


def determine_best_metric(
    trainer: TrainerRun, metrics: dict[str, float], trial: Any = None
) -> bool:
    """Is this evaluation the best so far, or among those whose checkpoints
    args.save_best_limit keeps? Notes it in the state if it is the best. Hook.

    Raises KeyError when metric_for_best_model, or one of save_best_metrics, is not
    among the metrics.
    """
    step, args = trainer.state.global_step, trainer.args
    wanted = best_metrics(args)
    if wanted:
        by = "save_best_metrics" if args.save_best_metrics else "metric_for_best_model"
        trainer._evaluated[step] = {
            name: float(_value(metrics, name, by)) for name in wanted
        }
    among = step in best_steps(trainer, trainer._evaluated)
    if args.metric_for_best_model is None:
        return among
    name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
    value = _value(metrics, name, "metric_for_best_model")
    best = trainer.state.best_metric
    greater = bool(args.greater_is_better)
    if best is None:
        best = float("-inf") if greater else float("inf")
    if not (value > best if greater else value < best):
        return among
    trainer.state.best_metric = value
    if args.save_strategy != "no":
        trainer.state.best_global_step = step
    return True


def _value(metrics: Mapping[str, float], name: str, argument: str) -> float:
    if name not in metrics:
        raise KeyError(
            f"{argument}={name!r} is not among the metrics of the evaluation, "
            f"{sorted(metrics)}; let compute_metrics return it"
        )
    return metrics[name]


def best_steps(trainer: TrainerRun, steps: Collection[int]) -> set[int]:
    """Those of these steps with the best evaluations, args.save_best_limit by each
    metric; of equal values the earlier is better, and NaN is never among them."""
    found: set[int] = set()
    for name, greater in best_metrics(trainer.args).items():
        values = {s: trainer._evaluated.get(s, {}).get(name, math.nan) for s in steps}
        ranked = sorted(
            (-value if greater else value, step)
            for step, value in values.items()
            if not math.isnan(value)
        )
        found.update(step for _, step in ranked[: trainer.args.save_best_limit])
    return found


def best_checkpoints(trainer: TrainerRun, paths: Iterable[str]) -> set[str]:
    """The real paths of the best of these checkpoints, with the one of
    metric_for_best_model."""
    by_step = {int(path.rpartition("-")[2]): realpath(path) for path in paths}
    found = {by_step[step] for step in best_steps(trainer, by_step)}
    best = trainer.state.best_model_checkpoint
    return found | {realpath(best)} if best else found


def recall(trainer: TrainerRun, entries: Iterable[Mapping[str, Any]]) -> None:
    """Note the evaluations of a run before: {"step": of it, metric: value}."""
    wanted = best_metrics(trainer.args)
    for entry in entries:
        values = {name: float(entry[name]) for name in wanted if name in entry}
        if values and "step" in entry:
            trainer._evaluated.setdefault(entry["step"], {}).update(values)


def note_best(trainer: TrainerRun, run: str) -> None:
    """Let the state say where the best checkpoint is, or will be in a moment."""
    best = trainer.state.best_global_step
    if best and trainer.args.save_strategy != "no":
        path = os.path.join(run, f"{PREFIX}-{best}")
        if best == trainer.state.global_step or os.path.isdir(path):
            trainer.state.best_model_checkpoint = path
