"""What the parts of fairseq's Trainer share: attributes, processes, lazy parts."""

from __future__ import annotations

import logging
import time
from typing import Any

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq import _sharding
from ctrainer.fairseq._background_saves import BackgroundSaves
from ctrainer.fairseq._sharded_ema import ShardedEMA
from ctrainer.fairseq._trainer_checks import setting
from ctrainer.fairseq.ema import build_ema
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler
from ctrainer.fairseq.optim import build_trainer_optimizer

logger = logging.getLogger("ctrainer.fairseq.trainer")


class Core(_C.FairseqTrainer):
    """Attributes by fairseq's names, the group of processes, and what is made on first
    use."""

    cfg: Any
    task: Any
    device: Any
    quantizer: Any
    _metrics: Any
    _model: Any
    _criterion: Any
    _dummy_batch: Any
    _ema: Any
    _average_model: Any
    _epoch_itr: Any
    _criterion_trains: bool
    _group: _C.Communicator | None
    _gathered_optim_state: Any
    _lr_scheduler: Any
    _optimizer: Any
    _optim_history: list[dict[str, Any]] | None
    _wrapped_criterion: Any
    _wrapped_model: Any
    _saves: BackgroundSaves
    _warn_once: set[str]
    _worker_states: tuple[int, list[Any]] | None
    _start_time: float
    _previous_training_time: float
    _cumulative_training_time: float | None

    # The group of processes that train on different batches

    @property
    def data_parallel_world_size(self) -> int:
        """How many processes share the batches; 1 without a group."""
        where = "distributed_training"
        if setting(self.cfg, where, "distributed_world_size", 1) == 1:
            return 1
        from ctrainer.comm import process_group

        return process_group.world_size()

    @property
    def data_parallel_process_group(self) -> Any:
        """torch's process group, or None in a single process."""
        if self.data_parallel_world_size == 1:
            return None
        from ctrainer.comm import processes

        return processes.default_group()

    @property
    def data_parallel_rank(self) -> int:
        """The place of this process in the group, from 0."""
        if self.data_parallel_world_size == 1:
            return 0
        from ctrainer.comm import process_group

        return process_group.rank()

    @property
    def is_data_parallel_master(self) -> bool:
        """Is this the process that saves and reports?"""
        return self.data_parallel_rank == 0

    @property
    def _communicator(self) -> _C.Communicator:
        """Of all that the processes exchange, gradients too: in one group those that
        are in different steps are told so, over two they would wait for each other."""
        if self._group is None:
            from ctrainer.comm import wrappers

            self._group = wrappers.ranks(self.data_parallel_process_group, self.device)
        return self._group

    @property
    def is_fsdp(self) -> bool:
        """Are parameters, gradients and optimizer state sharded over the processes?"""
        return _sharding.is_sharded(self.cfg)

    @property
    def use_distributed_wrapper(self) -> bool:
        """Does a wrapper around the model average its gradients?"""
        several = self.data_parallel_world_size > 1 and not self._uses_bmuf
        return several or self.is_fsdp

    @property
    def _uses_bmuf(self) -> bool:
        return bool(setting(self.cfg, "optimization", "use_bmuf", False))

    @property
    def _has_own_model(self) -> bool:
        """Does each process update a model of its own between exchanges?"""
        backend = setting(self.cfg, "distributed_training", "ddp_backend", None)
        return self._uses_bmuf or backend == "slowmo"

    @property
    def _averages_models(self) -> bool:
        """Is the model in SlowMo's wrapper? BMUF goes before it, and has none."""
        return (
            self._has_own_model and not self._uses_bmuf and self.use_distributed_wrapper
        )

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        return self.is_data_parallel_master or _sharding.saves_shards(self.cfg)

    @property
    def always_call_state_dict_during_save_checkpoint(self) -> bool:
        # The processes bring the state together.
        return self.is_fsdp and not _sharding.saves_shards(self.cfg)

    @property
    def checkpoint_suffix(self) -> str:
        """What the names of checkpoints end in, before .pt."""
        suffix = setting(self.cfg, "checkpoint", "checkpoint_suffix", "") or ""
        if _sharding.saves_shards(self.cfg):
            return f"{suffix}-shard{self.data_parallel_rank}"
        return str(suffix)

    def _sync_stats(self) -> bool:
        """Are sums and logs of this update exchanged? With BMUF where workers meet."""
        if self.data_parallel_world_size == 1:
            return False
        if not self._uses_bmuf:
            return True
        update, blocks = self.get_num_updates() + 1, self.cfg.bmuf
        return bool(
            update % blocks.global_sync_iter == 0 and update > blocks.warmup_iterations
        )

    # Made on first use

    def _wrap_model(self) -> None:
        if self.is_fsdp and setting(self.cfg, "ema", "store_ema", False):
            self._average_model = self._wrap(tools.copy_of(self._model))
        self._wrapped_model = self._wrap(self._model)

    def _wrap_criterion(self) -> None:
        trains = self._criterion_trains
        if trains and self.is_fsdp:
            raise ValueError(
                "the criterion has parameters, which --ddp-backend=fully_sharded would "
                "leave out of checkpoints; move them into the model"
            )
        self._wrapped_criterion = (
            self._wrap(self._criterion) if trains else self._criterion
        )

    def _wrap(self, module: Any) -> Any:
        """The module as all processes train it together; a collective."""
        if not self.use_distributed_wrapper:
            return module
        if self.is_fsdp:
            return _sharding.wrap(self.cfg, module, self._sharing_communicator())
        from ctrainer.comm import wrappers

        return wrappers.wrap(
            self.cfg.distributed_training,
            module,
            self.data_parallel_process_group,
            self.device,
        )

    def _sharing_communicator(self) -> _C.Communicator:
        alone = self.data_parallel_world_size == 1
        return _C.Communicator() if alone else self._communicator

    def clip_grad_norm(self, clip_norm: Any, /) -> Any:
        """Clip the gradients to that norm; return what it was. With sharded parameters
        it is that of all processes, which all call this."""
        if not self.is_fsdp:
            return super().clip_grad_norm(clip_norm)
        norm_of_all = _sharding.norm_of_all(self._sharing_communicator())
        return self.optimizer.clip_grad_norm(
            float(clip_norm), aggregate_norm_fn=norm_of_all
        )

    def _gather_logs(self, logs: list[Any] | None) -> list[Any]:
        """The logs of all processes in one list; None: none of this one."""
        mine = tools.to_bytes(logs or [])
        return [
            log
            for data in self._communicator.gather_bytes(mine)
            for log in tools.from_bytes(data, "what another process logged")
        ]

    def _build_optimizer(self) -> None:
        model = self.model if self.is_fsdp else self._model
        params = tools.trainable(model, self._criterion)
        several = self.data_parallel_world_size > 1
        self._optimizer = build_trainer_optimizer(
            self.cfg, params, self._communicator if several else None
        )
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
        if self.is_fsdp:
            sharded = self.model  # and its copy, made in the same moment
            self._ema = ShardedEMA(self._average_model, sharded, self.cfg.ema)
        else:
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
