"""What the parts of fairseq's Trainer share: its attributes, and one process."""

from __future__ import annotations

import logging
import time
from typing import Any

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq._trainer_checks import setting
from ctrainer.fairseq.ema import build_ema
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler
from ctrainer.fairseq.optim import build_precise_optimizer

logger = logging.getLogger("ctrainer.fairseq.trainer")


class Core(_C.FairseqTrainer):
    """Attributes by fairseq's names, properties of one process, and what is made on
    first use."""

    cfg: Any
    task: Any
    device: Any
    quantizer: Any
    _metrics: Any
    _model: Any
    _criterion: Any
    _dummy_batch: Any
    _ema: Any
    _epoch_itr: Any
    _gathered_optim_state: Any
    _lr_scheduler: Any
    _optimizer: Any
    _optim_history: list[dict[str, Any]] | None
    _wrapped_criterion: Any
    _wrapped_model: Any
    _warn_once: set[str]
    _start_time: float
    _previous_training_time: float
    _cumulative_training_time: float | None

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
        self._ema = build_ema(self._model, self.cfg.ema, self.device)
        logger.info("Exponential Moving Average Shadow Model is initialized.")

    # Time

    def cumulative_training_time(self) -> float:
        """Seconds of training, those before a restart included."""
        if self._cumulative_training_time is not None:
            return self._cumulative_training_time
        return self._local_cumulative_training_time()

    def _local_cumulative_training_time(self) -> float:
        return time.time() - self._start_time + self._previous_training_time
