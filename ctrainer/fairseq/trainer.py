"""fairseq's Trainer: its constructor, properties and methods over the C training step.

Source: fairseq, fairseq/trainer.py.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from typing import Any

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq import metrics as own_metrics
from ctrainer.fairseq._trainer_checks import check_config, setting
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler
from ctrainer.fairseq.optim import build_precise_optimizer

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


class Trainer(_C.FairseqTrainer):
    """Trains a fairseq task, model and criterion in one process.

    cfg: fairseq's config: groups common, optimization, optimizer, lr_scheduler,
        checkpoint, dataset, distributed_training, ema, model as attributes. What every
        update reads is taken over here; reinitialize() reads it again.
    task, model, criterion: as fairseq has them; the model is moved to the run's device
        and precision in place.
    quantizer: has set_trainer, begin_epoch and step_update; or None.
    original_dummies: a dummy sample in the last place of an update voids the sample
        size of all of it, as in fairseq. By default a dummy counts for nothing and the
        others for what they are.

    Raises ValueError for a setting that needs several processes or another device.
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
            raise TypeError(
                "cfg is an argparse.Namespace; expected fairseq's config with its "
                "groups as attributes"
            )
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
        shared = tools.shared_parameters(model)
        self._criterion, self._model = (
            tools.cast(module, self._fp16, self._bf16).to(self.device)
            for module in (criterion, model)
        )
        for first, *others in shared:
            for path in others:
                logger.info("detected shared parameter: %s <- %s", first, path)
                tools.tie(self._model, first, path)
        self._criterion_trains = tools.has_parameters(self._criterion)

    def _forget(self) -> None:
        """The state of a trainer that has done nothing."""
        self._dummy_batch: Any = None
        self._ema: Any = None
        self._gathered_optim_state: Any = None
        self._grad_norm_buf = None
        self._lr_scheduler: Any = None
        self._optim_history: list[dict[str, Any]] | None = None
        self._optimizer: Any = None
        self._wrapped_criterion: Any = None
        self._wrapped_model: Any = None
        self._num_updates = self._amp_retries = self._num_xla_compiles = 0
        self._warn_once: set[str] = set()
        self._previous_training_time: float = 0
        self._cumulative_training_time: float | None = None

    # One process: what a group of them would be asked for

    @property
    def data_parallel_world_size(self) -> int:
        return 1

    @property
    def data_parallel_process_group(self) -> None:
        return None

    @property
    def data_parallel_rank(self) -> int:
        return 0

    @property
    def is_data_parallel_master(self) -> bool:
        return self.data_parallel_rank == 0

    @property
    def is_fsdp(self) -> bool:
        return False

    @property
    def use_distributed_wrapper(self) -> bool:
        return False

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        return self.is_data_parallel_master

    @property
    def always_call_state_dict_during_save_checkpoint(self) -> bool:
        return False

    @property
    def checkpoint_suffix(self) -> str:
        """What the names of checkpoints end in, before .pt."""
        return setting(self.cfg, "checkpoint", "checkpoint_suffix", "") or ""

    def _sync_stats(self) -> bool:
        return False

    def consolidate_optimizer(self) -> None:
        """Gather the optimizer's state from all processes, of which there is one."""

    # Made on first use

    def _wrap_model(self) -> None:
        self._wrapped_model = self._model

    def _wrap_criterion(self) -> None:
        self._wrapped_criterion = self._criterion

    def _build_optimizer(self) -> None:
        params = tools.trainable(self.model, self.criterion)
        self._optimizer = build_precise_optimizer(self.cfg, params)
        schedule = self.cfg.lr_scheduler
        name = schedule if isinstance(schedule, str) else schedule._name
        self._lr_scheduler = build_lr_scheduler(
            name,
            schedule,
            self._optimizer,
            maximize=setting(
                self.cfg, "checkpoint", "maximize_best_checkpoint_metric", None
            ),
        )
        self._lr_scheduler.step_update(0)

    def _build_ema(self) -> None:
        raise ValueError("ema.store_ema: this trainer keeps no average of the weights")

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

    # Time and meters

    def cumulative_training_time(self) -> float:
        """Seconds of training, those before a restart included."""
        if self._cumulative_training_time is not None:
            return self._cumulative_training_time
        return self._local_cumulative_training_time()

    def _local_cumulative_training_time(self) -> float:
        return time.time() - self._start_time + self._previous_training_time

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

    def _log_oom(self, error: BaseException, in_update: bool = False) -> None:
        logger.warning("OOM: Ran out of memory with exception: %s", error)
        for summary in tools.memory_summaries():
            logger.warning(summary)
        if in_update:
            logger.error("OOM during optimization, irrecoverable")
        sys.stderr.flush()

    def _save_crash(
        self, error: BaseException, samples: list[Any], place: int | None, rng: Any
    ) -> None:
        logger.error("update %s failed: %s", self.get_num_updates() + 1, error)

    def _find_nonfinite(
        self, error: BaseException, samples: list[Any], rng: Any
    ) -> None:
        logger.error("the gradients of update %s are not finite", self._num_updates + 1)


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
