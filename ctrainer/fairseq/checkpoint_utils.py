"""When checkpoints are written, under which names, and which of them stay; by the names
of fairseq's checkpoint_utils.py.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.checkpoint.disk import replacing
from ctrainer.checkpoint.files import naming

# Checkpoints that are written while training continues (--save-async).


__all__ = ["BackgroundSaves"]


class BackgroundSaves:
    """Runs jobs of a save in a thread, in order; after a failure nothing more until
    wait() has raised it. A process that ends in order finishes what was begun.

    Example:
        >>> from ctrainer.fairseq.checkpoint_utils import BackgroundSaves
        >>> saves, done = BackgroundSaves(), []
        >>> saves.do(lambda: done.append(1))
        >>> saves.wait()
        >>> done
        [1]
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._problem: BaseException | None = None
        self._last: Callable[[], None] | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Run a job after those before it.

        Args:
            job (Callable[[], None]): What to run.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._last = self._pool.submit(self._run, job).result

    def _run(self, job: Callable[[], None]) -> None:
        if self._problem is None:
            try:
                job()
            except BaseException as problem:
                self._problem = problem

    def wait(self) -> None:
        """Return when all is written.

        Raises:
            OSError: a job has failed since the last time.
        """
        if self._last is not None:
            self._last()
            self._last = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise OSError(
                f"a checkpoint could not be written in the background: {problem}"
            ) from problem


# Checkpoints of fairseq's older releases in the layout of its last.
#
# Source: fairseq, checkpoint_utils.py, which lists what each release changed.


def upgrade_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """The same state, changed in place, in the layout of today.

    What a checkpoint of any release has to have is as it was: a file without an
    optimizer's history or a position, as published models have none, stays so.
    """
    if "optimizer_history" not in state and "best_loss" in state:
        state["optimizer_history"] = [
            {
                "criterion_name": "CrossEntropyCriterion",
                "best_loss": state.pop("best_loss"),
            }
        ]
        state["last_optimizer_state"] = state.pop("optimizer")
    if "epoch" in state and "extra_state" not in state:
        names = ("epoch", "batch_offset", "val_loss")
        state["extra_state"] = {name: state.pop(name) for name in names}
    if state.get("optimizer_history"):
        _upgrade_history(state)
    extra = state.get("extra_state")
    if extra is not None:
        position = {
            "epoch": extra.get("epoch", 0),
            "iterations_in_epoch": extra.get("batch_offset", 0),
        }
        extra.setdefault("train_iterator", position)
        extra.pop("train_meters", None)  # 0.9's; today's are in "metrics"
    if state.get("args") is not None:
        _upgrade_args(vars(state["args"]), extra)
    return state


def _upgrade_history(state: dict[str, Any]) -> None:
    last = state["optimizer_history"][-1]
    if "optimizer" in last:
        state["last_optimizer_state"] = last["optimizer"]
        for entry in state["optimizer_history"]:
            entry.pop("optimizer", None)
    last.setdefault("optimizer_name", "FairseqNAG")
    if "lr_scheduler_state" not in last:
        last["lr_scheduler_state"] = {"best": last.pop("best_loss", None)}
    last.setdefault("num_updates", 0)


def _upgrade_args(args: dict[str, Any], extra: dict[str, Any] | None) -> None:
    """args: the flat options that releases before 1.0 saved, by name."""
    args.setdefault("task", "translation")
    for old, new in (("raw_text", "raw"), ("lazy_load", "lazy")):
        if args.get(old):
            args["dataset_impl"] = new
            break
    if "remove_bpe" in args:
        args["post_process"] = args["remove_bpe"]
    if "min_lr" in args:
        args["stop_min_lr"] = args.pop("min_lr")
    if "max_positions" in args and "max_source_positions" not in args:
        args["max_source_positions"] = args["max_positions"]
        args["max_target_positions"] = args["max_positions"]
    if args.get("log_keys", ()) is None:
        del args["log_keys"]
    if isinstance(args.get("lr"), float):
        args["lr"] = [args["lr"]]
    if isinstance(args.get("data"), list) and args["data"]:
        args["data"] = args["data"][0]
    position = None if extra is None else extra.get("train_iterator")
    if position is not None:  # epochs were counted from 0 once
        position["epoch"] = max(position.get("epoch", 1), 1)


logger = logging.getLogger(__name__)

DEFAULT_RESTORE_FILE = "checkpoint_last.pt"
_FLAGS = ("optimizer", "lr_scheduler", "meters", "dataloader")


@dataclass
class Score:
    """The best validation so far, and for how many there was none better.

    It belongs to a trainer and is saved with its checkpoints; in fairseq it belongs to
    the process, and what patience counts is lost by a restart.
    """

    best: float | None = None
    patience_best: float | None = None
    num_runs: int = 0

    def note(self, value: float, maximize: bool) -> None:
        best = max if maximize else min
        self.best = value if self.best is None else best(value, self.best)

    def wait(self, value: float, maximize: bool) -> int:
        """Count a validation; return how many there were since the best one. One that
        is as good is not better."""
        before = self.patience_best
        if before is None or (value > before if maximize else value < before):
            self.patience_best, self.num_runs = value, 0
        else:
            self.num_runs += 1
        return self.num_runs

    def state_dict(self) -> dict[str, Any]:
        """For extra_state: fairseq knows "best" alone."""
        if self.best is None:
            return {}
        patience = {"best": self.patience_best, "num_runs": self.num_runs}
        return {"best": self.best, "patience": patience}

    def load_state_dict(self, extra_state: dict[str, Any]) -> None:
        """Of a checkpoint of fairseq's, patience begins at its best."""
        self.best = extra_state.get("best")
        patience = extra_state.get("patience") or {"best": self.best, "num_runs": 0}
        self.patience_best, self.num_runs = patience["best"], patience["num_runs"]


def score_of(trainer: Any) -> Score:
    """The Score of a trainer."""
    score = getattr(trainer, "_score", None)
    if score is None:
        score = trainer._score = Score()
    return score


# ---- saving --------------------------------------------------------------------------


def save_checkpoint(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> None:
    """Write what is due of checkpointE.pt, checkpoint_E_U.pt, checkpoint_best.pt,
    checkpoint.best_METRIC_VALUE.pt and checkpoint_last.pt into cfg.save_dir, and delete
    what the keep_* options no longer keep.

    cfg: the group `checkpoint`. val_loss: the metric of this validation, or None. Each
    file appears whole or not at all: the first is written, the others are copies. With
    write_checkpoints_asynchronously a thread does all of that; the save before has
    ended by then, and this raises OSError where it has failed.
    """
    score = score_of(trainer)
    if val_loss is not None:
        score.note(val_loss, cfg.maximize_best_checkpoint_metric)
    if cfg.no_save:
        return
    trainer.consolidate_optimizer()
    if not trainer.should_save_checkpoint_on_current_rank:
        if trainer.always_call_state_dict_during_save_checkpoint:
            trainer.state_dict()
        return
    trainer.finish_saves()
    os.makedirs(cfg.save_dir, exist_ok=True)
    started = time.perf_counter()
    names = _due(cfg, trainer, epoch_itr, val_loss, score)
    if names:
        extra_state = {
            "train_iterator": epoch_itr.state_dict(),
            "val_loss": val_loss,
            **score.state_dict(),
        }
        first, *others = [os.path.join(cfg.save_dir, name) for name in names]
        trainer.save_checkpoint(first, extra_state)
        epoch, updates = epoch_itr.epoch, trainer.get_num_updates()

        def finish() -> None:
            for other in others:
                _copy(first, other)
            logger.info(
                "Saved checkpoint %s (epoch %s @ %s updates, score %s) "
                "(writing took %.3f seconds)",
                first, epoch, updates, val_loss, time.perf_counter() - started,
            )  # fmt: skip

        trainer.after_save(finish)
    suffix, ends = trainer.checkpoint_suffix, epoch_itr.end_of_epoch()
    trainer.after_save(lambda: _delete_old(cfg, suffix, ends))


def _due(
    cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any, score: Score
) -> list[str]:
    """The names to write now."""
    epoch, updates = epoch_itr.epoch, trainer.get_num_updates()
    ends, suffix = epoch_itr.end_of_epoch(), trainer.checkpoint_suffix
    every = cfg.save_interval_updates
    names = {
        f"checkpoint{epoch}{suffix}.pt": ends
        and not cfg.no_epoch_checkpoints
        and epoch % cfg.save_interval == 0,
        f"checkpoint_{epoch}_{updates}{suffix}.pt": not ends
        and every > 0
        and updates % every == 0,
        # One that is as good as the best takes its place, as in fairseq.
        f"checkpoint_best{suffix}.pt": val_loss is not None and val_loss == score.best,
    }
    if val_loss is not None and cfg.keep_best_checkpoints > 0:
        names[_best_name(cfg, suffix, val_loss)] = _among_best(cfg, suffix, val_loss)
    names[f"checkpoint_last{suffix}.pt"] = not cfg.no_last_checkpoints
    return [name for name, due in names.items() if due]


def _best_pattern(cfg: Any, suffix: str) -> str:
    metric = re.escape(cfg.best_checkpoint_metric)
    return rf"checkpoint\.best_{metric}_(-?\d+\.?\d*){re.escape(suffix)}\.pt"


def _best_name(cfg: Any, suffix: str, value: float) -> str:
    """The value in three decimals and a digit more, so that equal ones stay apart."""
    start = f"checkpoint.best_{cfg.best_checkpoint_metric}_{value:.3f}"
    names = (f"{start}{digit}{suffix}.pt" for digit in range(10))
    free = (n for n in names if not os.path.exists(os.path.join(cfg.save_dir, n)))
    return next(free, f"{start}0{suffix}.pt")


def _among_best(cfg: Any, suffix: str, value: float) -> bool:
    kept = _paths(cfg.save_dir, _best_pattern(cfg, suffix))
    if len(kept) < cfg.keep_best_checkpoints:
        return True
    values = [round(number, 3) for number, _ in kept]
    if cfg.maximize_best_checkpoint_metric:
        return value >= min(values)
    return value <= max(values)


def _copy(source: str, path: str) -> None:
    """A copy that appears whole."""
    with replacing(path) as beside:
        shutil.copyfile(source, beside)


def _delete_old(cfg: Any, suffix: str, end_of_epoch: bool) -> None:
    tail = rf"{re.escape(suffix)}\.pt"
    old: list[str] = []
    if cfg.keep_interval_updates > 0 and not end_of_epoch:
        found = _paths(cfg.save_dir, rf"checkpoint_\d+_(\d+){tail}")
        every = cfg.keep_interval_updates_pattern
        passing = [path for number, path in found if every <= 0 or number % every]
        old += passing[cfg.keep_interval_updates :]
    if cfg.keep_last_epochs > 0:
        found = _paths(cfg.save_dir, rf"checkpoint(\d+){tail}")
        old += [path for _, path in found[cfg.keep_last_epochs :]]
    if cfg.keep_best_checkpoints > 0:
        found = _paths(cfg.save_dir, _best_pattern(cfg, suffix))
        if not cfg.maximize_best_checkpoint_metric:
            found.reverse()
        old += [path for _, path in found[cfg.keep_best_checkpoints :]]
    for path in old:
        os.remove(path)


def _paths(folder: str, pattern: str) -> list[tuple[float, str]]:
    """(number, path) of the files whose whole name matches, the greatest number first;
    the number is the pattern's first group."""
    matches = [re.fullmatch(pattern, name) for name in os.listdir(folder)]
    found = [(float(m[1]), os.path.join(folder, m[0])) for m in matches if m]
    return sorted(found, reverse=True)


def verify_checkpoint_directory(save_dir: str) -> None:
    """Make the folder. Raises OSError where files cannot be made in it."""
    os.makedirs(save_dir, exist_ok=True)
    probe = os.path.join(save_dir, f".probe-{os.getpid()}")
    with open(probe, "w"):
        pass
    os.remove(probe)


# ---- loading -------------------------------------------------------------------------


def load_checkpoint(cfg: Any, trainer: Any, **passthrough_args: Any) -> tuple[Any, Any]:
    """Load what cfg, the group `checkpoint`, says: (extra_state or None, the iterator
    of training, at its position).

    passthrough_args: for trainer.get_train_iterator().

    Raises:
        ValueError: finetune_from_model together with a reset_* or a restore_file.
        FileNotFoundError: a file that is named is not there.
    """
    path, resets = _restore_path(cfg, trainer.checkpoint_suffix)
    extra_state = trainer.load_checkpoint(
        path,
        resets["optimizer"],
        resets["lr_scheduler"],
        ast.literal_eval(cfg.optimizer_overrides),
        reset_meters=resets["meters"],
    )
    if extra_state is not None and not resets["optimizer"] and not resets["meters"]:
        with naming(path):
            score_of(trainer).load_state_dict(extra_state)
    if extra_state is not None and not resets["dataloader"]:
        with naming(path):
            position = extra_state["train_iterator"]
            epoch = int(position["epoch"])
        epoch_itr = trainer.get_train_iterator(
            epoch=epoch, load_dataset=True, **passthrough_args
        )
        with naming(path):
            epoch_itr.load_state_dict(position)
    else:
        epoch_itr = trainer.get_train_iterator(
            epoch=1, load_dataset=True, **passthrough_args
        )
    trainer.lr_step(epoch_itr.epoch)
    return extra_state, epoch_itr


def _restore_path(cfg: Any, suffix: str) -> tuple[str, dict[str, bool]]:
    """The file to load, and what of it is reset. Only checkpoint_last.pt may be
    missing: a run begins without it."""
    resets = {name: bool(getattr(cfg, f"reset_{name}")) for name in _FLAGS}
    finetune, is_default = cfg.finetune_from_model, _is_default(cfg)
    if finetune is not None:
        _check_finetuning(resets, is_default)
    if not is_default:
        return _existing(_beside(cfg, suffix), "--restore-file"), resets
    last = os.path.join(cfg.save_dir, f"checkpoint_last{suffix}.pt")
    if os.path.exists(last):
        return last, resets
    if cfg.continue_once is not None:
        return _existing(cfg.continue_once, "--continue-once"), resets
    if finetune is not None:
        logger.info("loading the model alone of %s", finetune)
        path = _existing(finetune, "--finetune-from-model")
        return path, dict.fromkeys(resets, True)
    return last, resets


def _is_default(cfg: Any) -> bool:
    return bool(cfg.restore_file == DEFAULT_RESTORE_FILE)


def _beside(cfg: Any, suffix: str) -> str:
    """restore_file, whose bare name may be one in save_dir, with the suffix."""
    path: str = cfg.restore_file
    if not os.path.dirname(path) and not os.path.exists(path):
        path = os.path.join(cfg.save_dir, path)
    return path.replace(".pt", f"{suffix}.pt")


def _check_finetuning(resets: dict[str, bool], is_default: bool) -> None:
    if any(resets.values()):
        given = ", ".join(
            f"--reset-{n.replace('_', '-')}" for n, v in resets.items() if v
        )
        raise ValueError(
            f"--finetune-from-model can not be set together with {given}: it resets "
            "all of them"
        )
    if not is_default:
        raise ValueError(
            "--finetune-from-model and --restore-file (non-default value) can not be "
            "specified together"
        )


def _existing(path: str, option: str) -> str:
    if not os.path.exists(path):
        raise FileNotFoundError(f"{option}: there is no file {path}")
    return path


def load_checkpoint_to_cpu(
    path: str, arg_overrides: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A checkpoint's dictionary, brought up to date. arg_overrides: options that
    replace those in its cfg, in whichever group has them."""
    state = tools.load_file(path)
    with naming(path):
        state = upgrade_state_dict(state)
    cfg = state.get("cfg")
    for name, value in (arg_overrides or {}).items():
        for group in (g for g in (cfg or {}).values() if isinstance(g, dict)):
            if name in group:
                group[name] = value
    return state


def load_model_ensemble_and_task(
    filenames: Sequence[str],
    arg_overrides: dict[str, Any] | None = None,
    task: Any = None,
    strict: bool = True,
) -> tuple[list[Any], Any, Any]:
    """(models, the last one's config, the task): the task is the first one's, unless it
    is given. Raises FileNotFoundError for a missing file."""
    # What they register says what the options of a checkpoint are.
    from ctrainer.fairseq import criterions, models, tasks  # noqa: F401
    from ctrainer.fairseq.config import checkpoint_config

    ensemble: list[Any] = []
    cfg = None
    for filename in filenames:
        state = load_checkpoint_to_cpu(_existing(filename, "model"), arg_overrides)
        cfg = checkpoint_config(state)
        task = tasks.setup_task(cfg.task) if task is None else task
        model = task.build_model(cfg.model)
        model.load_state_dict(state["model"], strict=strict, model_cfg=cfg.model)
        ensemble.append(model)
    return ensemble, cfg, task
