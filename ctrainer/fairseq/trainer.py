"""fairseq's Trainer: its constructor, properties and methods over the C training step.

Source: fairseq, fairseq/trainer.py.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, get_origin

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.arguments.settings import hints, without_none
from ctrainer.fairseq import _sharding
from ctrainer.fairseq import metrics as own_metrics
from ctrainer.fairseq._trainer_checkpoint import Failures
from ctrainer.fairseq._trainer_step import Step
from ctrainer.fairseq.config import as_config
from ctrainer.fairseq.config.base import setting
from ctrainer.fairseq.config.trees import groups, is_dict_config, tree_of
from ctrainer.fairseq.config.values import convert
from ctrainer.fairseq.iterators import EpochBatchIterator, StreamingEpochBatchIterator
from ctrainer.fairseq.utils import resolve_max_positions

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


def check_config(cfg: Any) -> None:
    """Raise for settings out of range, for those that exclude each other, in fairseq's
    words, and for those that this trainer does not have.

    Raises:
        ValueError: the message names the setting.
        AssertionError: fp16 together with amp, as in fairseq.
    """
    _check_values(cfg)
    _check_sharding(cfg)
    _sharding.check_zero(cfg)
    _check_slowmo(cfg)
    if setting(cfg, "common", "fp16"):
        assert not setting(cfg, "common", "amp"), (
            "Cannot use fp16 and AMP together; set one of both"
        )
    for group, name, allowed, why in _REJECTED:
        value = setting(cfg, group, name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{group}.{name} is {value!r}: {why}")


_READ = (
    "common", "distributed_training", "dataset", "optimization", "checkpoint", "bmuf",
    "ema",
)  # fmt: skip


def _check_values(cfg: Any) -> None:
    """The numbers that have a range: as_config() need not have made the config."""
    for group in _READ:
        cls, given = groups()[group], getattr(cfg, group, None)
        if is_dict_config(given):
            given = SimpleNamespace(**tree_of(given))
        for name, hint in hints(cls).items():
            ranged = get_origin(without_none(hint)[0]) is Annotated
            if ranged and hasattr(given, name):
                convert(getattr(given, name), hint, f"{group}.{name}")


def _check_sharding(cfg: Any) -> None:
    where = "distributed_training"
    if setting(cfg, where, "ddp_backend") != "fully_sharded":
        if setting(cfg, where, "cpu_offload"):
            raise ValueError("--cpu-offload requires --ddp-backend=fully_sharded")
        return
    if setting(cfg, where, "zero_sharding", "none") != "none":
        raise ValueError(
            "FullyShardedDataParallel is not compatible with --zero-sharding option "
            "(it's already built in)"
        )
    if setting(cfg, "optimization", "use_bmuf"):
        raise ValueError(
            "optimization.use_bmuf does not go with --ddp-backend=fully_sharded: BMUF "
            "needs the whole model in every process"
        )


def _check_slowmo(cfg: Any) -> None:
    where = "distributed_training"
    several = setting(cfg, where, "distributed_world_size", 1)
    if several < 2 or setting(cfg, where, "ddp_backend") != "slowmo":
        return
    base = setting(cfg, where, "slowmo_base_algorithm", "localsgd")
    if base != "localsgd":
        raise ValueError(
            f"distributed_training.slowmo_base_algorithm is {base!r}; expected localsgd"
        )
    if setting(cfg, where, "nprocs_per_node", 1) != 1:
        raise ValueError(
            "distributed_training.nprocs_per_node is above 1: gradients are not "
            "exchanged within a node; set it to 1"
        )


_WHOLE = "every worker of this trainer holds the whole model and its optimizer"
_REJECTED: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("common", "tpu", (False,), "there is no support for TPUs here"),
    ("common", "model_parallel_size", (1,), _WHOLE),
    ("distributed_training", "pipeline_model_parallel", (False,), _WHOLE),
    ("model", "base_layers", (0,), f"BASE layers are spread over workers; {_WHOLE}"),
]


class Iterators(Step):
    """get_train_iterator() and get_valid_iterator()."""

    def get_train_iterator(
        self,
        epoch: int,
        combine: bool = True,
        load_dataset: bool = True,
        data_selector: Callable[..., Any] | None = None,
        shard_batch_itr: bool = True,
        disable_iterator_cache: bool = False,
    ) -> Any:
        """Return the EpochBatchIterator of the training subset.

        Args:
            epoch (int): From 1.
            combine (bool, default True): Put the subset's parts together: train, train1
                and so on.
            load_dataset (bool, default True): Have the task load the subset first.
            data_selector (Callable[..., Any] | None, default None): Not read here;
                passed to the task.
            shard_batch_itr (bool, default True): This rank's batches, else all of them.
            disable_iterator_cache (bool, default False): Make the iterator anew.
        """
        data = self.cfg.dataset
        if load_dataset:
            logger.info("loading train data for epoch %s", epoch)
            self.task.load_dataset(
                data.train_subset, epoch=epoch, combine=combine,
                data_selector=data_selector, tpu=False,
            )  # fmt: skip
        seed = setting(self.cfg, "common", "seed", 1)
        reorders = self._option("update_ordered_indices_seed")
        self._epoch_itr = self._batches(
            self.task.dataset(data.train_subset),
            "",
            shard_batch_itr,
            max_positions=self._max_positions(self._option("max_tokens")),
            ignore_invalid_inputs=True,
            seed=seed + epoch if reorders else seed,
            epoch=epoch,
            disable_iterator_cache=disable_iterator_cache,
            skip_remainder_batch=setting(
                self.cfg, "optimization", "skip_remainder_batch", False
            ),
            grouped_shuffling=self._option("grouped_shuffling", False),
            update_epoch_batch_itr=self._option("update_epoch_batch_itr", False),
        )
        return self._epoch_itr

    def get_valid_iterator(
        self, subset: str, disable_iterator_cache: bool = False
    ) -> Any:
        """Return the EpochBatchIterator of a validation subset, which the task has
        loaded.

        Every validation begins at epoch 1, with the same draws. A subset that is being
        trained on has an iterator of its own, and stays at training's epoch.

        Args:
            subset (str): Its name.
            disable_iterator_cache (bool, default False): Make the iterator anew.
        """
        dataset, of_training = self.task.dataset(subset), self._epoch_itr
        is_trained_on = getattr(of_training, "dataset", None) is dataset
        skips = self._option("skip_invalid_size_inputs_valid_test", False)
        batch_iterator = self._batches(
            dataset,
            "_valid",
            True,
            max_positions=self._max_positions(),
            ignore_invalid_inputs=skips,
            seed=setting(self.cfg, "common", "seed", 1),
            epoch=of_training.epoch if is_trained_on else 1,
            disable_iterator_cache=disable_iterator_cache or is_trained_on,
            skip_remainder_batch=False,
        )
        if isinstance(batch_iterator, EpochBatchIterator | StreamingEpochBatchIterator):
            batch_iterator.load_state_dict({"epoch": 1})
        return batch_iterator

    def _option(self, name: str, default: Any = None) -> Any:
        return setting(self.cfg, "dataset", name, default)

    def _batches(self, dataset: Any, of: str, shard: bool, **options: Any) -> Any:
        """The task's iterator. of: with which the names of its limits end."""
        option = self._option
        made = self.task.get_batch_iterator(
            dataset=dataset,
            max_tokens=option(f"max_tokens{of}", option("max_tokens")),
            max_sentences=option(f"batch_size{of}", option("batch_size")),
            required_batch_size_multiple=option("required_batch_size_multiple", 8),
            num_shards=self.data_parallel_world_size if shard else 1,
            shard_id=self.data_parallel_rank if shard else 0,
            num_workers=option("num_workers", 1),
            data_buffer_size=option("data_buffer_size", 10),
            **options,
        )
        self.reset_dummy_batch(made.first_batch)
        return made

    def _max_positions(self, *more: int | None) -> Any:
        of_model = getattr(self.get_model(), "max_positions", None)
        limit = None if of_model is None else of_model()
        return resolve_max_positions(self.task.max_positions(), limit, *more)


class Trainer(Iterators, Failures):
    """Trains a fairseq task, model and criterion, in one process or several.

    With distributed_world_size above 1 every process of torch.distributed's default
    group makes its own, on its own batches (ctrainer.fairseq.distributed joins it).

    Args:
        cfg: fairseq's config: groups common, optimization, optimizer, lr_scheduler,
            checkpoint, dataset, distributed_training, ema, model as attributes. Values
            that every update reads are taken over here; reinitialize() reads them
            again. An argparse.Namespace is converted, with fairseq's warning.
        task: As fairseq has it.
        model: As fairseq has it; moved to the run's device and precision in place.
        criterion: As fairseq has it.
        quantizer (default None): Has set_trainer, begin_epoch and step_update; or None.
        original_dummies (bool, default False): A dummy batch in the last place of an
            update voids the sample size of all of it, as in fairseq. By default a dummy
            counts for nothing and the others for what they are.

    Raises:
        ValueError: a setting that is not supported, or several processes are asked for
            and torch.distributed is not initialised.

    Example:
        >>> import inspect
        >>> from ctrainer.fairseq import Trainer
        >>> list(inspect.signature(Trainer).parameters)[:4]
        ['cfg', 'task', 'model', 'criterion']
    """

    def __init__(
        self,
        cfg: Any,
        task: Any,
        model: Any,
        criterion: Any,
        quantizer: Any = None,
        *,
        original_dummies: bool = False,
    ) -> None:
        if isinstance(cfg, Namespace):
            cfg = as_config(cfg)
        check_config(cfg)
        self.cfg, self.task, self.quantizer = cfg, task, quantizer
        self.original_dummies = original_dummies
        self.tpu = False
        self.device = tools.choose_device(bool(setting(cfg, "common", "cpu")))
        self.cuda = self.device.type != "cpu"
        self.pipeline_model_parallel, self.last_device = False, None
        self.cuda_env = self.cuda_env_arr = None
        self._metrics = _metrics_of_the_task()
        self._place(model, criterion)
        self._forget()
        self._read_config()
        if quantizer is not None:
            quantizer.set_trainer(self)
        self._metrics.log_start_time("wall", priority=790, round=0)
        self._start_time = time.time()

    def _place(self, model: Any, criterion: Any) -> None:
        """Move model and criterion, and tie again what the move has untied."""
        fp16, bf16 = (setting(self.cfg, "common", n) for n in ("fp16", "bf16"))
        half = not self.is_fsdp  # shards are float32 in any precision
        shared = tools.shared_parameters(model)
        self._criterion, self._model = (
            tools.cast(module, fp16 and half, bf16 and half).to(self.device)
            for module in (criterion, model)
        )
        for first, *others in shared:
            for path in others:
                logger.info("detected shared parameter: %s <- %s", first, path)
                tools.tie(self._model, first, path)
        self._criterion_trains = tools.has_parameters(self._criterion)

    # Epochs

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch in schedule, quantizer and task.

        Args:
            epoch (int): From 1.
        """
        logger.info("begin training epoch %s", epoch)
        self.lr_step_begin_epoch(epoch)
        if self.quantizer is not None:
            self.quantizer.begin_epoch(epoch)
        self.task.begin_epoch(epoch, self.get_model())

    def begin_valid_epoch(self, epoch: int) -> None:
        """Begin a validation in the task.

        Args:
            epoch (int): From 1.
        """
        self.task.begin_valid_epoch(epoch, self.get_model())

    # Meters

    def get_meter(self, name: str) -> Any:
        """Return a meter by its old name; deprecated, as in fairseq: see
        fairseq.metrics.

        Args:
            name (str): "train_loss" and so on.
        """
        if "get_meter" not in self._warn_once:
            self._warn_once.add("get_meter")
            logger.warning(
                "Trainer.get_meter is deprecated. Please use fairseq.metrics instead."
            )
        train = self._metrics.get_meters("train") or {}
        if name in _OLD_METERS:
            group, key, kind = _OLD_METERS[name]
            found = self._metrics.get_meter(group, key)
            return found or (kind() if kind is not None else train.get(name))
        return train.get(name)


_OLD_METERS: dict[str, tuple[str, str, Any]] = {
    "train_loss": ("train", "loss", None),
    "train_nll_loss": ("train", "nll_loss", own_metrics.AverageMeter),
    "valid_loss": ("valid", "loss", own_metrics.AverageMeter),
    "valid_nll_loss": ("valid", "nll_loss", own_metrics.AverageMeter),
    "wall": ("default", "wall", own_metrics.TimeMeter),
    "wps": ("train", "wps", own_metrics.TimeMeter),
    "oom": ("train", "oom", own_metrics.SumMeter),
}


def _metrics_of_the_task() -> Any:
    """fairseq's metrics where they are loaded, since its tasks log there; else ours."""
    return sys.modules.get("fairseq.logging.metrics", own_metrics)
