"""fairseq's Trainer: its constructor, properties and methods over the C training step.

Source: fairseq, fairseq/trainer.py.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from typing import Any

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq import metrics as own_metrics
from ctrainer.fairseq._sharding import is_sharded
from ctrainer.fairseq._trainer_base import Iterators, check_config, setting
from ctrainer.fairseq._trainer_checkpoint import Failures
from ctrainer.fairseq.checkpoint_utils import BackgroundSaves
from ctrainer.fairseq.config import as_config

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


class Trainer(Iterators, Failures):
    """Trains a fairseq task, model and criterion, in one process or several.

    cfg: fairseq's config: groups common, optimization, optimizer, lr_scheduler,
        checkpoint, dataset, distributed_training, ema, model as attributes. What every
        update reads is taken over here; reinitialize() reads it again.
    task, model, criterion: as fairseq has them; the model is moved to the run's device
        and precision in place.
    quantizer: has set_trainer, begin_epoch and step_update; or None.
    original_dummies: a dummy sample in the last place of an update voids the sample
        size of all of it, as in fairseq. By default a dummy counts for nothing and the
        others for what they are.

    An argparse.Namespace as cfg is converted, with fairseq's warning.

    With distributed_world_size above 1 every process of torch.distributed's default
    group makes its own, on its own batches (ctrainer.fairseq.distributed joins it).

    Raises ValueError for a setting that is not supported, or where several processes
    are asked for and torch.distributed is not initialised.
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
        self.device = tools.choose_device(bool(setting(cfg, "common", "cpu", False)))
        self.cuda = self.device.type == "cuda"
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
        self._fp16 = bool(setting(self.cfg, "common", "fp16", False))
        self._bf16 = bool(setting(self.cfg, "common", "bf16", False))
        half = not is_sharded(self.cfg)  # shards are of float32 and compute in 16 bits
        shared = tools.shared_parameters(model)
        self._criterion, self._model = (
            tools.cast(module, self._fp16 and half, self._bf16 and half).to(self.device)
            for module in (criterion, model)
        )
        for first, *others in shared:
            for path in others:
                logger.info("detected shared parameter: %s <- %s", first, path)
                tools.tie(self._model, first, path)
        self._criterion_trains = tools.has_parameters(self._criterion)

    def _forget(self) -> None:
        """The state of a trainer that has done nothing."""
        self._dummy_batch = None
        self._ema = None
        self._epoch_itr = None
        self._group = None
        self._gathered_optim_state = None
        self._grad_norm_buf = None
        self._lr_scheduler = None
        self._optim_history = None
        self._optimizer = None
        self._wrapped_criterion = None
        self._wrapped_model = None
        self._num_updates = self._amp_retries = self._num_xla_compiles = 0
        self._saves = BackgroundSaves()
        self._warn_once = set()
        self._worker_states = None
        self._previous_training_time = 0
        self._cumulative_training_time = None

    # Epochs

    def begin_epoch(self, epoch: int) -> None:
        """Tell schedule, quantizer and task that an epoch begins."""
        logger.info("begin training epoch %s", epoch)
        self.lr_step_begin_epoch(epoch)
        if self.quantizer is not None:
            self.quantizer.begin_epoch(epoch)
        self.task.begin_epoch(epoch, self.get_model())

    def begin_valid_epoch(self, epoch: int) -> None:
        """Tell the task that a validation begins."""
        self.task.begin_valid_epoch(epoch, self.get_model())

    # Meters

    def get_meter(self, name: str) -> Any:
        """A meter by its old name; deprecated, as in fairseq: see fairseq.metrics."""
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

    # Called by the C half

    _seed_torch = staticmethod(tools.seed)
    _no_grad = staticmethod(tools.no_grad)
    _empty_cache = staticmethod(tools.empty_cache)
    _rng_state = staticmethod(tools.rng_state)

    def _tell(self, level: str, text: str) -> None:
        getattr(logger, level)(text)

    def _convert_sample(self, sample: Any) -> Any:
        early = bool(setting(self.cfg, "common", "on_cpu_convert_precision", False))
        dtype = tools.sample_dtype(self._fp16, self._bf16)
        return tools.convert_sample(sample, dtype, self.device, early)

    def _log_memory(self) -> None:
        self._metrics.log_scalar("gb_free", tools.memory_gb(), 0, 1500, 1)


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
