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
from ctrainer.fairseq._trainer_base import Iterators, check_config
from ctrainer.fairseq._trainer_checkpoint import Failures
from ctrainer.fairseq.config import as_config
from ctrainer.fairseq.config.base import setting

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


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
        fp16, bf16 = (setting(self.cfg, "common", n) for n in ("fp16", "bf16"))
        half = not is_sharded(self.cfg)  # shards are float32 in any precision
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
