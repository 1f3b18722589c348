"""The base of fairseq's Trainer: checks of the config, processes, iterators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, get_origin

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.arguments.settings import hints, without_none
from ctrainer.fairseq import _sharding
from ctrainer.fairseq._sharding import ShardedEMA
from ctrainer.fairseq._trainer_step import Step
from ctrainer.fairseq.config.base import setting
from ctrainer.fairseq.config.trees import groups, is_dict_config, tree_of
from ctrainer.fairseq.config.values import convert
from ctrainer.fairseq.ema import EMA
from ctrainer.fairseq.iterators import EpochBatchIterator, StreamingEpochBatchIterator
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler
from ctrainer.fairseq.optim import build_trainer_optimizer

# The checks of a config: fairseq's, and the options that this trainer rejects.


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
        assert not setting(cfg, "common", "amp"), "Cannot use fp16 and AMP together"
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


# The group of processes, and the modules and optimizer that are made on first use.


logger = logging.getLogger("ctrainer.fairseq.trainer")


class Core(Step):
    """The group of processes, and the parts that are made on first use."""

    _average_model: Any

    # The group of processes that train on different batches

    @property
    def data_parallel_world_size(self) -> int:
        """How many processes share the batches; 1 without a group."""
        if setting(self.cfg, "distributed_training", "distributed_world_size", 1) == 1:
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
        """The group of all exchanges, gradients too: ranks in different steps get an
        error in one group, and would wait for each other over two."""
        if self._group is None:
            from ctrainer.fairseq import wrappers

            self._group = wrappers.ranks(self.data_parallel_process_group, self.device)
        return self._group

    @property
    def is_fsdp(self) -> bool:
        """Are parameters, gradients and optimizer state sharded over the processes?"""
        return _sharding.is_sharded(self.cfg)

    @property
    def use_distributed_wrapper(self) -> bool:
        """Does a wrapper around the model average its gradients?"""
        several = self.data_parallel_world_size > 1 and not self._bmuf
        return several or self.is_fsdp

    @property
    def _has_own_model(self) -> bool:
        """Does each process update a model of its own between exchanges?"""
        return self._bmuf or self._slowmo

    @property
    def _averages_models(self) -> bool:
        """Is the model in SlowMo's wrapper? BMUF goes before it, and has none."""
        return self._slowmo and not self._bmuf and self.use_distributed_wrapper

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        """Whether this process writes checkpoints: the first, or with sharded state
        each."""
        return self.is_data_parallel_master or _sharding.saves_shards(self.cfg)

    @property
    def always_call_state_dict_during_save_checkpoint(self) -> bool:
        """Whether all processes have to call state_dict(): they bring the state
        together."""
        # The processes bring the state together.
        return self.is_fsdp and not _sharding.saves_shards(self.cfg)

    @property
    def checkpoint_suffix(self) -> str:
        """The end of the names of checkpoints, before .pt."""
        suffix = setting(self.cfg, "checkpoint", "checkpoint_suffix", "") or ""
        if _sharding.saves_shards(self.cfg):
            return f"{suffix}-shard{self.data_parallel_rank}"
        return str(suffix)

    def _sync_stats(self) -> bool:
        """Are sums and logs of this update exchanged? With BMUF at synchronizations."""
        if self.data_parallel_world_size == 1:
            return False
        if not self._bmuf:
            return True
        update, blocks = self.get_num_updates() + 1, self.cfg.bmuf
        return bool(
            update % blocks.global_sync_iter == 0 and update > blocks.warmup_iterations
        )

    # Made on first use

    def _build_part(self, part: str) -> None:
        """Make the model, criterion or ema that the trainer uses."""
        if part == "model":
            if self.is_fsdp and self._stores_ema:
                self._average_model = self._wrap(_sharding.copy_of(self._model))
            self._wrapped_model = self._wrap(self._model)
        elif part == "ema":
            self._ema = self._new_ema()
            logger.info("Exponential Moving Average Shadow Model is initialized.")
        else:
            self._wrapped_criterion = self._wrap_criterion()

    def _wrap_criterion(self) -> Any:
        if not self._criterion_trains:
            return self._criterion
        if self.is_fsdp:
            raise ValueError(
                "the criterion has parameters, which --ddp-backend=fully_sharded would "
                "leave out of checkpoints; move them into the model"
            )
        return self._wrap(self._criterion)

    def _wrap(self, module: Any) -> Any:
        """The module as all processes train it together; a collective."""
        if not self.use_distributed_wrapper:
            return module
        if self.is_fsdp:
            return _sharding.wrap(self.cfg, module, self._sharing_communicator())
        from ctrainer.fairseq import wrappers

        return wrappers.wrap(
            self.cfg.distributed_training,
            module,
            self.data_parallel_process_group,
            self.device,
        )

    def _sharing_communicator(self) -> _C.Communicator:
        alone = self.data_parallel_world_size == 1
        return _C.Communicator() if alone else self._communicator

    def clip_grad_norm(self, clip_norm: Any) -> Any:
        """Clip the gradients to a norm; return the norm before. With sharded parameters
        it is that of all processes, which all call this.

        Args:
            clip_norm: The largest norm; 0: no clipping.
        """
        if not self.is_fsdp:
            return super().clip_grad_norm(clip_norm)
        norm_of_all = _sharding.norm_of_all(self._sharing_communicator())
        return self.optimizer.clip_grad_norm(
            float(clip_norm), aggregate_norm_fn=norm_of_all
        )

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
            maximize=setting(self.cfg, "checkpoint", "maximize_best_checkpoint_metric"),
        )
        self._lr_scheduler.step_update(0)

    def _new_ema(self) -> Any:
        if not self.is_fsdp:
            return EMA(self._model, self.cfg.ema, self.device)
        sharded = self.model  # and its copy, made in the same moment
        return ShardedEMA(self._average_model, sharded, self.cfg.ema)

    # Time

    def cumulative_training_time(self) -> float:
        """Return the seconds of training, those before a restart included."""
        if self._cumulative_training_time is not None:
            return self._cumulative_training_time
        return self._local_cumulative_training_time()


# The iterators that fairseq's Trainer asks its task for.


def resolve_max_positions(*limits: Any) -> Any:
    """Return the least of limits. A number beside a tuple or a dict limits each of its
    entries.

    Args:
        *limits: None, numbers, tuples of them or dicts of them.
    """
    found = None
    for limit in limits:
        found = _least(found, limit)
    return found


def _least(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict) or isinstance(b, dict):
        of_a = a if isinstance(a, dict) else dict.fromkeys(b, a)
        of_b = b if isinstance(b, dict) else dict.fromkeys(a, b)
        return {k: _least(of_a.get(k), of_b.get(k)) for k in {**of_a, **of_b}}
    if isinstance(a, tuple | list) or isinstance(b, tuple | list):
        in_a = a if isinstance(a, tuple | list) else [a] * len(b)
        in_b = b if isinstance(b, tuple | list) else [b] * len(a)
        return tuple(map(_least, in_a, in_b))
    return min(a, b)


class Iterators(Core):
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
