"""`ctrainer fairseq-train DATA --task ... --arch ...`: fairseq's program.

Source of the loop: fairseq, fairseq_cli/train.py. docs/how-to/fairseq_train.md says
where ours differs.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq import (
    checkpoint_utils,
    data_utils,
    distributed,
    iterators,
    metrics,
    utils,
)
from ctrainer.fairseq.config import as_config, parse_training_args, to_dict
from ctrainer.fairseq.program_log import log_to_stdout
from ctrainer.fairseq.progress_bar import training_progress_bar
from ctrainer.fairseq.trainer import Trainer

logger = logging.getLogger(__name__)

Losses = list[float | None]

_REJECTED = {
    "quantization_config_path": "there is no quantizer here",
    "profile": "run the program under NVIDIA's profiler instead",
}


def main(arguments: list[str]) -> int:
    """The command; 0."""
    log_to_stdout()
    cfg = parse_args(arguments)
    distributed.call_main(cfg, _work)
    return 0


def _work(cfg: Any) -> None:
    """What each process of the program runs; the first one logs."""
    if distributed.is_master(cfg.distributed_training):
        log_to_stdout()
    train(cfg)


def parse_args(
    arguments: Sequence[str],
    modify_parser: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Any:
    """The config of a command line, whose --user-dir is imported first."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--user-dir")
    import_components(first.parse_known_args(arguments)[0])

    def modify(parser: argparse.ArgumentParser) -> None:
        parser.prog = "ctrainer fairseq-train"
        if modify_parser is not None:
            modify_parser(parser)

    return parse_training_args(arguments, modify_parser=modify)


def import_components(common: Any) -> None:
    """Register tasks, models and criterions: ours, and those in common.user_dir."""
    from ctrainer.fairseq import criterions, models, tasks  # noqa: F401

    utils.import_user_module(common)


def train(cfg: Any) -> Trainer:
    """Train as a config says, resuming from its last checkpoint; return the trainer.

    Raises ValueError for options that contradict each other or are not acted on.
    """
    if isinstance(cfg, argparse.Namespace):
        cfg = as_config(cfg)
    import_components(cfg.common)
    _check(cfg)
    metrics.reset()
    np.random.seed(cfg.common.seed)
    utils.set_torch_seed(cfg.common.seed)
    if distributed.is_master(cfg.distributed_training):
        checkpoint_utils.verify_checkpoint_directory(cfg.checkpoint.save_dir)
    logger.info("%s", to_dict(cfg))
    run = TrainingRun(cfg)
    try:
        run.run()
    finally:
        run.trainer.finish_saves()
    return run.trainer


def trainer_of(cfg: Mapping[str, Any]) -> Trainer:
    """The Trainer of a checkpoint's config, with its task, model and criterion, before
    any data are loaded."""
    from ctrainer.fairseq import tasks

    import_components(argparse.Namespace(user_dir=cfg["common"].get("user_dir")))
    whole = as_config(cfg, unknown="warn")
    task = tasks.setup_task(whole.task)
    model = task.build_model(whole.model)
    return Trainer(whole, task, model, task.build_criterion(whole.criterion))


def _check(cfg: Any) -> None:
    if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
        raise ValueError(
            "Must specify batch size either with --max-tokens or --batch-size"
        )
    if not cfg.criterion:
        raise ValueError("Please specify criterion to train a model: --criterion")
    for name, why in _REJECTED.items():
        value = getattr(cfg.common, name)
        if value:
            raise ValueError(f"common.{name} is {value!r}: {why}")


class TrainingRun:
    """A run of the program: what it is made of, and its loop.

    cfg: a whole FairseqConfig. `task`, `trainer` and `epoch_itr`, the iterator of the
    epoch under way, can be looked at from anywhere that the program calls.
    """

    def __init__(self, cfg: Any) -> None:
        from ctrainer.fairseq import tasks

        self.cfg = cfg
        self.task = tasks.setup_task(cfg.task)
        model = self.task.build_model(cfg.model)
        criterion = self.task.build_criterion(cfg.criterion)
        _describe(model, self.task, criterion)
        self.valid_subsets = self._load_valid_subsets()
        self.trainer = Trainer(cfg, self.task, model, criterion)
        world = cfg.distributed_training.distributed_world_size
        logger.info("training on %s devices (GPUs/TPUs)", world)
        # Data in several folders differ from epoch to epoch.
        self._sharded = self.task.has_sharded_data("train")
        _, self.epoch_itr = checkpoint_utils.load_checkpoint(
            cfg.checkpoint, self.trainer, disable_iterator_cache=self._sharded
        )
        self.score = checkpoint_utils.score_of(self.trainer)

    def _load_valid_subsets(self) -> list[str]:
        dataset = self.cfg.dataset
        subsets: list[str] = dataset.valid_subset.split(",")
        if dataset.disable_validation:
            return subsets
        if dataset.combine_valid_subsets:
            self.task.load_dataset("valid", combine=True, epoch=1)
            return ["valid"]
        data_utils.raise_if_valid_subsets_unintentionally_ignored(self.cfg)
        for subset in subsets:
            self.task.load_dataset(subset, combine=False, epoch=1)
        return subsets

    # ---- epochs ----------------------------------------------------------------------

    def run(self) -> None:
        """Train until an option says stop."""
        started, optimization = time.perf_counter(), self.cfg.optimization
        lr = self.trainer.get_lr()
        while self.epoch_itr.next_epoch_idx <= (optimization.max_epoch or math.inf):
            if lr <= optimization.stop_min_lr:
                logger.info(
                    "stopping training because current learning rate (%s) is smaller "
                    "than or equal to minimum learning rate (--stop-min-lr=%s)",
                    lr, optimization.stop_min_lr,
                )  # fmt: skip
                break
            valid_losses, should_stop = self._train_epoch()
            if should_stop:
                break
            # Only the first subset's loss drives the schedule.
            lr = self.trainer.lr_step(self.epoch_itr.epoch, valid_losses[0])
            self.epoch_itr = self.trainer.get_train_iterator(
                self.epoch_itr.next_epoch_idx,
                load_dataset=self._sharded,
                disable_iterator_cache=self._sharded,
            )
        logger.info("done training in %.1f seconds", time.perf_counter() - started)

    def _updates_of_epoch(self) -> Any:
        """The groups of batches of the next epoch, one an update."""
        cfg, itr = self.cfg, self.epoch_itr
        batches = itr.next_epoch_itr(
            fix_batches_to_gpus=cfg.distributed_training.fix_batches_to_gpus,
            shuffle=itr.next_epoch_idx > cfg.dataset.curriculum,
        )
        frequencies = cfg.optimization.update_freq
        return iterators.GroupedIterator(
            batches,
            frequencies[min(itr.epoch, len(frequencies)) - 1],
            skip_remainder_batch=cfg.optimization.skip_remainder_batch,
        )

    @metrics.aggregate("train")
    def _train_epoch(self) -> tuple[Losses, bool]:
        """(losses of the last validation, whether to stop)."""
        updates = self._updates_of_epoch()
        epoch = self.epoch_itr.epoch
        progress = self._progress(updates, None)
        progress.update_config(to_dict(self.cfg))
        self.trainer.begin_epoch(epoch)
        valid_losses: Losses = [None]
        should_stop = False
        logger.info("Start iterating over samples")
        for samples in progress:
            self._train_step(samples, progress)
            valid_losses, should_stop = self._validate_and_save(not updates.has_next())
            if should_stop:
                break
        logger.info("end of epoch %s (average epoch stats below)", epoch)
        stats = _with_wall(metrics.get_smoothed_values("train"))
        progress.print(stats, tag="train", step=self.trainer.get_num_updates())
        metrics.reset_meters("train")
        return valid_losses, should_stop

    def _train_step(self, samples: Any, progress: Any) -> None:
        with metrics.aggregate("train_inner"):
            done = self.trainer.train_step(samples)
        if done is None:  # the update was skipped
            return
        updates = self.trainer.get_num_updates()
        if updates % self.cfg.common.log_interval == 0:
            stats = _with_wall(metrics.get_smoothed_values("train_inner"))
            progress.log(stats, tag="train_inner", step=updates)
            metrics.reset_meters("train_inner")

    def _progress(self, iterator: Any, prefix: str | None) -> Any:
        master = distributed.is_master(self.cfg.distributed_training)
        epoch = self.epoch_itr.epoch
        return training_progress_bar(self.cfg, iterator, epoch, prefix, master)

    # ---- after each update -----------------------------------------------------------

    def _validate_and_save(self, end_of_epoch: bool) -> tuple[Losses, bool]:
        should_stop = self._limit_reached()
        do_save = should_stop or self._save_is_due(end_of_epoch)
        valid_losses: Losses = [None]
        if self._validation_is_due(end_of_epoch, do_save, should_stop):
            valid_losses = self._validate()
        should_stop = self._out_of_patience(valid_losses[0]) or should_stop
        if do_save or should_stop:
            checkpoint_utils.save_checkpoint(
                self.cfg.checkpoint, self.trainer, self.epoch_itr, valid_losses[0]
            )
        return valid_losses, should_stop

    def _limit_reached(self) -> bool:
        """Whether max_update or stop_time_hours ends the run."""
        optimization = self.cfg.optimization
        updates, most = self.trainer.get_num_updates(), optimization.max_update
        if 0 < most <= updates:
            logger.info(
                "Stopping training due to num_updates: %s >= max_update: %s",
                updates, most,
            )  # fmt: skip
            return True
        hours = self.trainer.cumulative_training_time() / 3600
        if 0 < optimization.stop_time_hours < hours:
            logger.info(
                "Stopping training due to cumulative_training_time: %s > "
                "stop_time_hours: %s hour(s)", hours, optimization.stop_time_hours,
            )  # fmt: skip
            return True
        return False

    def _save_is_due(self, end_of_epoch: bool) -> bool:
        checkpoint, updates = self.cfg.checkpoint, self.trainer.get_num_updates()
        if end_of_epoch and self.epoch_itr.epoch % checkpoint.save_interval == 0:
            return True
        after = self.cfg.dataset.validate_after_updates
        return updates >= after and _is_due(updates, checkpoint.save_interval_updates)

    def _validation_is_due(
        self, end_of_epoch: bool, do_save: bool, should_stop: bool
    ) -> bool:
        dataset, updates = self.cfg.dataset, self.trainer.get_num_updates()
        if dataset.disable_validation or updates < dataset.validate_after_updates:
            return False
        return (
            (do_save and not end_of_epoch)
            or (end_of_epoch and self.epoch_itr.epoch % dataset.validate_interval == 0)
            or should_stop
            or _is_due(updates, dataset.validate_interval_updates)
        )

    def _out_of_patience(self, loss: float | None) -> bool:
        checkpoint = self.cfg.checkpoint
        if loss is None or checkpoint.patience <= 0:
            return False
        waited = self.score.wait(loss, checkpoint.maximize_best_checkpoint_metric)
        if waited < checkpoint.patience:
            return False
        logger.info(
            "early stop since valid performance hasn't improved for last %s runs",
            checkpoint.patience,
        )
        return True

    # ---- validation ------------------------------------------------------------------

    def _validate(self) -> Losses:
        """The metric that best_checkpoint_metric names, of each subset."""
        # Training seeds torch's generator for each update, and no other.
        generators = tools.rng_state()
        try:
            seed = self.cfg.dataset.fixed_validation_seed
            if seed is not None:
                utils.set_torch_seed(seed)
            self.trainer.begin_valid_epoch(self.epoch_itr.epoch)
            return [self._validate_on(subset) for subset in self.valid_subsets]
        finally:
            tools.set_rng_state(generators)

    def _validate_on(self, subset: str) -> float:
        logger.info('begin validation on "%s" subset', subset)
        batches = self.trainer.get_valid_iterator(subset).next_epoch_itr(
            shuffle=False, set_dataset_epoch=False
        )
        progress = self._progress(batches, f"valid on '{subset}' subset")
        most = self.cfg.dataset.max_valid_steps
        # What is logged here is no part of training's numbers.
        with metrics.aggregate(new_root=True) as aggregator:
            for i, sample in enumerate(progress):
                if most is not None and i >= most:
                    break
                self.trainer.valid_step(sample)
        stats = self._valid_stats(aggregator.get_smoothed_values(), subset)
        if hasattr(self.task, "post_validate"):
            self.task.post_validate(self.trainer.get_model(), stats, aggregator)
        progress.print(stats, tag=subset, step=self.trainer.get_num_updates())
        metric = self.cfg.checkpoint.best_checkpoint_metric
        if metric not in stats:
            raise ValueError(
                f"checkpoint.best_checkpoint_metric is {metric!r}, and validation "
                f"logs {', '.join(stats)}"
            )
        return float(stats[metric])

    def _valid_stats(self, stats: Any, subset: str) -> Any:
        """With the number of updates and, of the first subset, the best so far."""
        stats["num_updates"] = self.trainer.get_num_updates()
        checkpoint = self.cfg.checkpoint
        metric, best = checkpoint.best_checkpoint_metric, self.score.best
        if subset == self.valid_subsets[0] and best is not None and metric in stats:
            better = max if checkpoint.maximize_best_checkpoint_metric else min
            stats[f"best_{metric}"] = better(best, stats[metric])
        return stats


def _is_due(updates: int, interval: int) -> bool:
    return interval > 0 and updates > 0 and updates % interval == 0


def _with_wall(stats: Any) -> Any:
    """Stats with the seconds since the trainer was made."""
    wall: Any = metrics.get_meter("default", "wall")
    stats["wall"] = round(wall.elapsed_time, 0)
    return stats


def _describe(model: Any, task: Any, criterion: Any) -> None:
    logger.info("%s", model)
    for role, part in (("task", task), ("model", model), ("criterion", criterion)):
        logger.info("%s: %s", role, type(part).__name__)
    counts = [p.numel() for p in model.parameters()]
    trained = sum(p.numel() for p in tools.trainable(model))
    logger.info("num. model params: %s (num. trained: %s)", sum(counts), trained)
