"""The parts of fairseq's training step that run once an update or more rarely:
settings, samples, sums over ranks, metrics, learning rates, validation, the group of
processes, and the modules and optimizer that are made on first use.

train_step() itself is _C.FairseqTrainer's, which calls these methods by name.
Source: fairseq, fairseq/trainer.py.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import time
import zlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.comm.run import is_open
from ctrainer.fairseq import _sharding
from ctrainer.fairseq._lazy import LazyNorm, LazyNumber, LazyValues
from ctrainer.fairseq._split import Samples
from ctrainer.fairseq.checkpoint_utils import BackgroundSaves
from ctrainer.fairseq.config.base import setting
from ctrainer.fairseq.ema import EMA
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler
from ctrainer.fairseq.optim import build_trainer_optimizer
from ctrainer.runtime.notes import locate

logger = logging.getLogger("ctrainer.fairseq.trainer")


def _number(cfg: Any, group: str, name: str, default: float) -> Any:
    """An option that is a number, a whole one where the default is whole."""
    value = setting(cfg, group, name, default)
    try:
        if isinstance(default, float):
            return math.ldexp(value, 0)  # which takes no text, as float() does
        return operator.index(value)
    except TypeError:
        raise TypeError(f"cfg.{group}.{name} is {value!r}; expected a number") from None


class Step(_C.FairseqTrainer):
    """The methods that train_step() calls, valid_step(), and the parts of a trainer."""

    cfg: Any
    task: Any
    device: Any
    quantizer: Any
    cuda: bool
    original_dummies: bool
    _metrics: Any
    _model: Any
    _criterion: Any
    _criterion_trains: bool
    _start_time: float
    _average_model: Any
    _step_name: str | None = None  # of the sums that are under way
    _in_doubt = False  # the groups were left before the last update was done

    # Settings

    def _forget(self) -> None:
        """Take the state of a trainer that has done nothing."""
        self._dummy_batch: Any = None
        self._epoch_itr: Any = None
        self._group: _C.Communicator | None = None
        self._ema: Any = None
        self._gathered_optim_state = self._grad_norm_buf = None
        self._lr_scheduler: Any = None
        self._optim_history: list[dict[str, Any]] | None = None
        self._optimizer: Any = None
        self._wrapped_criterion: Any = None
        self._wrapped_model: Any = None
        self._num_updates = self._amp_retries = self._num_xla_compiles = 0
        self._saves = BackgroundSaves()
        self._warn_once: set[str] = set()
        self._worker_states: tuple[int, list[Any]] | None = None
        self._previous_training_time: float = 0
        self._cumulative_training_time: float | None = None

    def _read_config(self) -> None:
        """Take over what every update reads of cfg. Called by the constructor and by
        reinitialize(): a change of cfg after that has no effect on train_step(). A read
        through OmegaConf takes 8 microseconds, and an update of fairseq's makes 41."""
        cfg = self.cfg
        self._seed = _number(cfg, "common", "seed", 1)
        self._cache_freq = _number(cfg, "common", "empty_cache_freq", 0)
        self._retries = _number(cfg, "common", "amp_batch_retries", 2)
        self._fp16, self._bf16, self._amp = (
            bool(_number(cfg, "common", name, 0)) for name in ("fp16", "bf16", "amp")
        )
        self._stores_ema = bool(_number(cfg, "ema", "store_ema", 0))
        self._clip_norm = _number(cfg, "optimization", "clip_norm", 0.0)
        if not self._clip_norm >= 0.0:
            raise ValueError(
                f"cfg.optimization.clip_norm is {self._clip_norm}; expected a norm to "
                "clip to, or 0 for none"
            )
        self._ranks = self.data_parallel_world_size
        self._bmuf = bool(_number(cfg, "optimization", "use_bmuf", 0))
        self._slowmo = setting(cfg, "distributed_training", "ddp_backend") == "slowmo"
        self._parts = self._split_samples()
        self._take_settings(
            metrics=self._metrics,
            clip_norm=self._clip_norm,
            world_size=self._ranks,
            amp=self._amp,
            bmuf=self._bmuf,
            slowmo=self._slowmo,
            cuda=self.cuda,
            original_dummies=self.original_dummies,
            criterion_trains=self._criterion_trains,
            parts=self._parts,
            lazy_norm=LazyNorm if self._enqueues_updates() else None,
        )

    def _enqueues_updates(self) -> bool:
        """Whether updates may be left to a GPU without a wait for their norm: nothing
        but an error depends on it before the next update."""
        if not self.cuda or self.is_fsdp:
            return False
        scales = self._fp16 or self._amp
        averages = self._stores_ema or self._bmuf or self._slowmo
        return not (scales or averages or self.quantizer)

    def _split_samples(self) -> Samples | None:
        """What splits samples that run out of memory, where cfg asks for that."""
        if not _number(self.cfg, "common", "split_oom_batches", 0):
            return None
        if self.is_fsdp:
            raise ValueError(
                "common.split_oom_batches does not go with --ddp-backend=fully_sharded:"
                " the other processes would wait for the one that runs out of memory; "
                "leave out --split-oom-batches"
            )
        return Samples(self)

    def reinitialize(self) -> None:
        """Forget schedule, optimizer and wrappers, as after a change of the parameters,
        and read cfg again."""
        self._await_update()
        self._lr_scheduler = self._optimizer = None
        self._wrapped_criterion = self._wrapped_model = None
        self._read_config()

    # Plain accessors

    def get_model(self) -> Any:
        """Return the model without its wrapper."""
        return self._model

    def get_criterion(self) -> Any:
        """Return the criterion without its wrapper."""
        return self._criterion

    def get_num_updates(self) -> int:
        """Return the number of updates made."""
        return self._num_updates

    def get_lr(self) -> Any:
        """Return the learning rate of the next update."""
        return self.optimizer.get_lr()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def clip_grad_norm(self, clip_norm: Any) -> Any:
        """Clip the gradients to a norm; return the norm before. With sharded parameters
        it is that of all processes, which all call this.

        Args:
            clip_norm: The largest norm; 0: no clipping.
        """
        if not self.is_fsdp:
            return self.optimizer.clip_grad_norm(clip_norm)
        norm_of_all = _sharding.norm_of_all(self._sharing_communicator())
        return self.optimizer.clip_grad_norm(
            float(clip_norm), aggregate_norm_fn=norm_of_all
        )

    # The learning rate

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of updates, and with it learning rate and quantizer.

        Args:
            num_updates (int): Updates done.
        """
        self._num_updates = num_updates
        self.lr_step_update()
        if self.quantizer is not None:
            self.quantizer.step_update(num_updates)
        self._metrics.log_scalar("num_updates", num_updates, 0, 200)

    def lr_step_update(self) -> Any:
        """Set the learning rate for the number of updates; log and return it.

        Of a schedule with several learning rates each is logged, and "default" or the
        first returned.

        Raises:
            ValueError: the schedule returned a dict without any.
        """
        lr = self.lr_scheduler.step_update(self.get_num_updates())
        if not isinstance(lr, dict):
            self._metrics.log_scalar("lr", lr, 0, 300)
            return lr
        if not lr:
            raise ValueError("lr_scheduler.step_update() returned an empty dict")
        for name, value in lr.items():
            self._metrics.log_scalar(f"lr_{name}", value, 0, 300)
        return lr.get("default", next(iter(lr.values())))

    def lr_step(self, epoch: int, val_loss: float | None = None) -> Any:
        """Set the learning rate at the end of an epoch; log and return it.

        Args:
            epoch (int): From 1.
            val_loss (float | None, default None): Of the epoch's validation.
        """
        self.lr_scheduler.step(epoch, val_loss)
        return self.lr_step_update()

    def lr_step_begin_epoch(self, epoch: int) -> Any:
        """Set the learning rate at the start of an epoch; log and return it.

        Args:
            epoch (int): From 1.
        """
        self.lr_scheduler.step_begin_epoch(epoch)
        return self.lr_step_update()

    # Samples

    def reset_dummy_batch(self, batch: Any) -> None:
        """Set the batch that replaces an empty one.

        Args:
            batch: The batch; "DUMMY": the first real one.
        """
        self._dummy_batch = batch

    def _prepare_sample(self, sample: Any, is_dummy: bool = False) -> tuple[Any, bool]:
        """(sample in the run's precision and on its device, whether it is a dummy).
        None or an empty sample is replaced by the dummy batch."""
        if isinstance(sample, str) and sample == "DUMMY":
            raise Exception(
                "Trying to use an uninitialized 'dummy' batch. This usually indicates "
                "that the total number of batches is smaller than the number of "
                "participating GPUs. Try reducing the batch size or using fewer GPUs."
            )
        if sample is None or len(sample) == 0:
            dummy = self._dummy_batch
            if dummy is None or len(dummy) == 0:
                raise AssertionError(
                    f"Invalid dummy batch: {dummy}; an empty sample needs one to take "
                    "its place: call reset_dummy_batch() with a sample"
                )
            return self._prepare_sample(dummy, is_dummy=True)[0], True
        if self._fp16 or self._bf16 or self.cuda:
            early = setting(self.cfg, "common", "on_cpu_convert_precision")
            dtype = tools.sample_dtype(self._fp16, self._bf16)
            sample = tools.convert_sample(sample, dtype, self.device, bool(early))
        if isinstance(self._dummy_batch, str) and self._dummy_batch == "DUMMY":
            self._dummy_batch = sample
        return sample, False

    def _set_seed(self) -> None:
        """Seed torch with cfg.common.seed plus the number of updates, so that a resumed
        run draws what a run that was not stopped would."""
        tools.seed(self._seed + self.get_num_updates())

    def _begin(self) -> None:
        self._set_seed()
        self.model.train()
        self.criterion.train()
        self.zero_grad()

    def _begin_step(self) -> tuple[Any, Any]:
        """Begin an update: (states of the generators before it, the averaged model for
        tasks that ask for it)."""
        generators = tools.rng_state()
        self._begin()
        self._metrics.log_start_time("train_wall", 800, 0)
        return generators, self._averaged_model()

    def _averaged_model(self) -> Any:
        uses = self._stores_ema and getattr(self.task, "uses_ema", False)
        return self.ema.get_model() if uses else None

    def _repeat_step(self, samples: list[Any]) -> None:
        """Do forward and backward of samples as train_step() does, of this rank alone
        and without an update: for the search for Inf and NaN and for `replay`."""
        average = self._averaged_model()
        more = {} if average is None else {"ema_model": average}
        self._begin()
        alone: AbstractContextManager[Any] = nullcontext()
        if self._ranks > 1 and hasattr(self.model, "no_sync"):
            alone = self.model.no_sync()
        with alone:
            for sample in samples:
                self.task.train_step(
                    sample=self._prepare_sample(sample)[0],
                    model=self.model,
                    criterion=self.criterion,
                    optimizer=self.optimizer,
                    update_num=self.get_num_updates(),
                    ignore_grad=False,
                    **more,
                )

    # Failures

    def _exchanges_in_backward(self) -> bool:
        """Do the other ranks wait for this rank's gradients during the backward pass of
        the last sample?"""
        return self._ranks > 1 and not hasattr(self.model, "all_reduce_grads")

    def _handle_oom(
        self, error: BaseException, is_last: bool
    ) -> tuple[bool, bool] | None:
        """Of a sample that ran out of memory: whether its backward pass had begun, so
        that the gradients may hold a part of it, and whether a dummy has to take its
        place; None where the update cannot continue, since the other ranks are in an
        exchange that this rank cannot begin anew."""
        begun = bool(getattr(self.optimizer, "in_backward", True))
        begun = begun or (self._parts is not None and self._parts.spoilt)
        waits = is_last and self._exchanges_in_backward()
        if waits and begun and not self._bmuf:
            return None
        self._log_oom(error)
        logger.warning("attempting to recover from OOM in forward/backward pass")
        return begun, waits

    def _log_oom(self, error: BaseException, in_update: bool = False) -> None:
        raise NotImplementedError

    _empty_cache = staticmethod(tools.empty_cache)

    def _on_overflow(self, error: BaseException | None) -> bool:
        """After an overflow, whether the samples are to be run again. error: of the
        scaler; None: of amp, which tries a batch amp_batch_retries times more."""
        if error is None:
            if self._amp_retries < self._retries:
                self._amp_retries += 1
                return True
            logger.info("AMP: skipping this batch.")
            self._amp_retries = 0
            return False
        logger.info("NOTE: gradient overflow detected, ignoring gradient, %s", error)
        self.zero_grad()
        if self._bmuf and self._ranks > 1:  # the other ranks count on this update
            self.optimizer.count_update()
        return False

    # Metrics

    def _finish_update(
        self, outputs: list[Any], sample_size: Any, grad_norm: Any, overflow: bool
    ) -> Any:
        """Count an update and log it; the logging output. After an overflow None, but
        where ranks update models of their own and have to stay in step."""
        perform = getattr(self.model, "perform_slowmo", None)
        if perform is not None:
            master = getattr(self.optimizer, "fp32_params", None)
            perform(self.optimizer.optimizer, master)
        output = None
        if not overflow or self._slowmo or (self._bmuf and self._ranks > 1):
            output = self._count_update(outputs, sample_size, grad_norm)
        if self._fp16 or self._amp:
            scaler = self.optimizer.scaler
            scale = scaler.loss_scale if self._fp16 else scaler.get_scale()
            self._metrics.log_scalar("loss_scale", scale, 0, 700, 4)
        self._metrics.log_stop_time("train_wall")
        return output

    def _count_update(
        self, outputs: list[Any], sample_size: Any, grad_norm: Any
    ) -> Any:
        updates = self.get_num_updates() + 1
        self.set_num_updates(updates)
        if self._stores_ema:
            self.ema.step(self.get_model(), updates)
            self._metrics.log_scalar("ema_decay", self.ema.get_decay(), 0, 10000, 5)
        free = tools.memory_gb() if self.cuda else None
        if free is not None:
            self._metrics.log_scalar("gb_free", free, 0, 1500, 1)
        output = self._reduce_and_log_stats(outputs, sample_size, grad_norm)
        every = self._cache_freq
        if self.cuda and every > 0 and (updates + every - 1) % every == 0:
            self._empty_cache()
        return output

    def _reduce_and_log_stats(
        self, logging_outputs: Any, sample_size: Any, grad_norm: Any = None
    ) -> Any:
        """Log speed, norm and share of clipped updates, let task.reduce_metrics() log
        the rest, and return the smoothed values as a dict."""
        metrics, norm = self._metrics, grad_norm
        lazy = isinstance(norm, LazyNorm)  # its value is finite, or an error
        if not lazy:
            norm = math.nan if norm is None else float(norm)
        if lazy or math.isfinite(norm):
            metrics.log_speed("ups", 1.0, 100, 2)
            metrics.log_scalar("gnorm", norm, 1, 400, 3)
            if self._clip_norm > 0:
                share = functools.partial(_percent_clipped, self._clip_norm)
                clipped = LazyNumber(share, norm) if lazy else share(norm)
                metrics.log_scalar("clip", clipped, 1, 500, 1)
        context = metrics.aggregate()
        meters = context.__enter__()
        try:
            if logging_outputs is not None:
                self.task.reduce_metrics(logging_outputs, self.get_criterion())
            if "loss" not in meters:
                self._log_no_loss()
            values = functools.partial(_smoothed, meters, sample_size)
            # Of a GPU's tensors a read waits for the update.
            known = {"sample_size": sample_size}
            return LazyValues(values, known) if self.cuda else values()
        finally:
            context.__exit__(None, None, None)  # fairseq's own forgets its `finally`

    def _log_no_loss(self) -> None:
        if "loss" not in self._warn_once:
            self._warn_once.add("loss")
            logger.warning(
                "Criterion.reduce_metrics did not log a 'loss' value, which may break "
                "some functionality"
            )
        self._metrics.log_scalar("loss", -1)

    # Sums over ranks

    def _sum_samples(
        self,
        outputs: list[Any],
        dummies: list[Any],
        sample_size: Any,
        ooms: int,
        samples: list[Any],
        last_is_dummy: bool,
    ) -> tuple[list[Any], Any, bool, bool] | None:
        """(logging outputs, sample size, whether these are sums over the ranks, whether
        all ranks leave the update to their GPUs) of an update; None where no rank has a
        sample left.

        outputs, dummies: of the real samples and of the dummies. ooms: how many samples
        ran out of memory.
        """
        void = last_is_dummy and self.original_dummies
        size = sample_size * 0.0 if void else sample_size
        size = size.float() if hasattr(size, "float") else float(size)
        synced, real, enqueue = False, float(len(outputs)), self._can_enqueue()
        if self._ranks > 1 and self._sync_stats():
            step = (
                f"train_step() after {self.get_num_updates()} updates (number of "
                f"samples: {len(samples)})"
            )
            seconds = self._local_cumulative_training_time()
            logs, sums = self._aggregate_in(
                step, outputs or dummies, size, ooms, seconds, len(outputs), enqueue,
                ignore=real == 0 or void,
            )  # fmt: skip
            size, dropped, seconds, real, can = (float(number) for number in sums)
            ooms, enqueue = int(dropped), can == self._ranks
            self._cumulative_training_time = seconds / self._ranks
            synced = True
            if real > 0:  # else the dummies' outputs remain
                outputs = list(logs)
        if ooms > 0:
            self._metrics.log_scalar_sum("oom", ooms, 600)
            if real == 0 and not (self._bmuf and self._ranks > 1):
                return None
        return outputs or dummies, size, synced, enqueue

    def _local_cumulative_training_time(self) -> float:
        return time.time() - self._start_time + self._previous_training_time

    def _aggregate_in(self, step: str, *args: Any, ignore: bool) -> Any:
        """_aggregate_logging_outputs() of ranks that are all in this step, or raise."""
        self._step_name = step
        try:
            return self._aggregate_logging_outputs(*args, ignore=ignore)
        finally:
            self._step_name = None

    def _aggregate_logging_outputs(
        self, logging_outputs: Any, *extra_stats_to_sum: Any, ignore: bool = False
    ) -> tuple[list[Any], tuple[float, ...]]:
        """(logs, sums of the extra numbers) over all ranks: the logs summed where the
        task says that the criterion's can be, else all of them."""
        summed = type(self.task).logging_outputs_can_be_summed(self.get_criterion())
        method = self._fast_stat_sync_sum if summed else self._all_gather_list_sync
        return method(logging_outputs, *extra_stats_to_sum, ignore=ignore)

    def _all_gather_list_sync(
        self, logging_outputs: Any, *extra_stats_to_sum: Any, ignore: bool = False
    ) -> tuple[list[Any], tuple[float, ...]]:
        """(the logs of all ranks, sums of the extra numbers). Logs are plain data:
        containers, numbers, text, tensors and arrays, of any size."""
        extras = _extra_numbers(extra_stats_to_sum)
        sums = self._sums_of(_in_blocks(extras))
        logs = self._gather_logs(None if ignore else list(logging_outputs))
        return logs, tuple(sums[: len(extras)])

    def _fast_stat_sync_sum(
        self, logging_outputs: Any, *extra_stats_to_sum: Any, ignore: bool = False
    ) -> tuple[list[Any], tuple[float, ...]]:
        """([sums of the logs], sums of the extra numbers) over all ranks, in a
        collective of 64 numbers and, of more, a second one. Ranks that log different
        keys, or have no logs, exchange the logs themselves instead: all ranks see that
        in the first 64 numbers, so that none waits in a collective of its own. Tensors
        on a GPU are added up there, over NCCL, and no host waits for them.
        """
        logs, extras = list(logging_outputs), _extra_numbers(extra_stats_to_sum)
        keys = sorted(logs[0]) if logs else []
        there = [key for key in keys if self._stays_on_gpu(logs, key)]
        keys = [key for key in keys if key not in there]
        names = "\0".join([*keys, "", *there]).encode()
        hashed = float(zlib.crc32(names) & 0xFFFF)  # of which squares add up exactly
        first = _EXTRAS + len(extras)
        totals = [0.0 if ignore else _total(logs, key) for key in keys]
        values = _in_blocks(
            [float(bool(logs)), hashed, hashed * hashed, *extras, *totals]
        )
        sums = self._sums_of(values[:_BLOCK])
        knowing, hashes, squares = sums[:_EXTRAS]
        # Hashes are equal where the mean of their squares is the square of their mean.
        if knowing == self._ranks and self._ranks * squares == hashes * hashes:
            if len(values) > _BLOCK:
                sums += self._sums_of(values[_BLOCK:])
            found: list[Any] = [dict(zip(keys, sums[first:], strict=False))]
            if there:
                found[0] |= self._sums_on_gpu(logs, there, ignore)
        else:
            found = self._gather_logs(None if ignore else logs)
        return found, tuple(sums[_EXTRAS:first])

    def _stays_on_gpu(self, logs: list[Any], key: str) -> bool:
        on_nccl = self._communicator.gpu is not None
        return on_nccl and all(tools.is_on_gpu(log.get(key)) for log in logs)

    def _sums_on_gpu(self, logs: list[Any], keys: list[str], ignore: bool) -> Any:
        """The sums over logs and ranks of numbers on the GPU, as tensors of float64."""
        rows = [[] if ignore else [log[key] for log in logs] for key in keys]
        totals = tools.totals_of(rows, self.device)
        _C.sum_tensor(self._communicator, totals)
        return dict(zip(keys, totals, strict=True))

    def _sums_of(self, values: list[float]) -> list[float]:
        return self._communicator.sum_numbers(self._step_name, values)

    def _gather_logs(self, logs: list[Any] | None) -> list[Any]:
        """The logs of all ranks in one list; None: no logs of this rank."""
        mine = tools.to_bytes(logs or [])
        return [
            log
            for data in self._communicator.gather_bytes(mine)
            for log in tools.from_bytes(data, "what another process logged")
        ]

    def _check_grad_norms(self, grad_norm: Any) -> None:
        """Compare the norm with those of the other ranks, on any device.

        Norms that are not finite on all ranks, or with amp on some, are errors of
        their own. Raises FloatingPointError, with a table of the norms, where they
        differ by more than 1e-6 of the first rank's: parameters would drift apart.
        """
        if self._ranks == 1:
            return
        self._check_collectives()
        gathered = np.zeros(self._ranks)
        self._communicator.all_gather(gathered, np.array([float(grad_norm)]))
        norms: list[float] = gathered.tolist()
        finite = sum(map(math.isfinite, norms))
        if finite == len(norms):
            first = norms[0]
            if all(abs(norm - first) / (first + 1e-6) < 1e-6 for norm in norms):
                return
        elif finite == 0 or self._amp:
            return
        table = "\n".join(f"rank {r:3d} = {norm:.8f}" for r, norm in enumerate(norms))
        rule = "-" * 80
        raise FloatingPointError(
            "Fatal error: gradients are inconsistent between workers. Try "
            "--ddp-backend=legacy_ddp. Or are you mixing up different generation of "
            f"GPUs in training?\n{rule}\ngrad_norm across the workers:\n{table}\n\n"
            f"{rule}"
        )

    def _check_collectives(self) -> None:
        """Raise RuntimeError where a collective of the GPUs has failed in the update
        that the host has waited for: the streams have continued with wrong values."""
        for group in self._groups_on_gpus():
            group.check()
        if self._in_doubt:
            raise RuntimeError(
                "the GPU had not done the last update when another rank failed, and may"
                " have used wrong gradients: load a checkpoint into a new Trainer"
            )

    def _groups_on_gpus(self) -> list[_C.Communicator]:
        """Those whose collectives streams wait for, unless they have been closed."""
        groups = [self._group] if self.cuda and self._ranks > 1 else []
        if groups and self.is_fsdp and self._wrapped_model is not None:
            groups.append(self._wrapped_model.communicator)
        made = [group for group in groups if group is not None and is_open(group)]
        return [g for g in made if g.gpu is not None or g.backend == "nccl"]

    def _await_update(self) -> None:
        """Wait for the result of the last update where a GPU is still busy with it.

        Raises:
            FloatingPointError: the norm of its gradients is Inf or NaN.
            RuntimeError: a collective of the GPUs has failed.
        """
        super()._await_update()
        self._check_collectives()

    # Validation

    def valid_step(self, sample: Any, raise_oom: bool = False) -> Any:
        """Evaluate one sample and return what was logged of it, a dict.

        Args:
            sample: A batch.
            raise_oom (bool, default False): Raise where it runs out of memory; else it
                is tried once more.
        """
        self._await_update()
        context = self._metrics.aggregate("valid")
        context.__enter__()
        try:
            with tools.no_grad():
                return self._evaluate(sample, raise_oom)
        except Exception as error:
            locate(error, "fairseq", (self, "validation before update", [sample], 0))
            raise
        finally:
            context.__exit__(None, None, None)  # fairseq's own forgets its `finally`

    def _evaluate(self, sample: Any, raise_oom: bool) -> Any:
        average = self._averaged_model()
        more = {} if average is None else {"ema_model": average}
        self.model.eval()
        self.criterion.eval()
        prepared, is_dummy = self._prepare_sample(sample)
        try:
            result = self.task.valid_step(prepared, self.model, self.criterion, **more)
        except RuntimeError as error:
            if raise_oom or "out of memory" not in str(error):
                raise
            self._log_oom(error)
            result = None  # and the traceback is dropped with its tensors
        if result is None:
            self.model.zero_grad()
            logger.warning("ran out of memory in validation step, retrying batch")
            if self.cuda:
                self._empty_cache()
            return self.valid_step(prepared, True)
        _, size, output = result
        size, outputs = size * 0.0 if is_dummy else size, [output]
        if self._ranks > 1:
            step = f"valid_step() after {self.get_num_updates()} updates"
            outputs, (size,) = self._aggregate_in(step, outputs, size, ignore=is_dummy)
        return self._reduce_and_log_stats(outputs, size)

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

            self._group = wrappers.ranks(
                self.data_parallel_process_group, self.cfg.distributed_training
            )
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

        make = wrappers.wrap if self._parts is None else wrappers.wrap_apart
        return make(
            self.cfg.distributed_training,
            module,
            self.data_parallel_process_group,
            self.device,
        )

    def _sharing_communicator(self) -> _C.Communicator:
        alone = self.data_parallel_world_size == 1
        return _C.Communicator() if alone else self._communicator

    def _build_optimizer(self) -> None:
        model = self.model if self.is_fsdp else self._model
        params = tools.trainable(model, self._criterion)
        several = self.data_parallel_world_size > 1
        if several and self._bmuf:  # with it the model has no wrapper
            from ctrainer.fairseq import wrappers

            options = self.cfg.distributed_training
            wrappers.serves(self._communicator, self.device, options)
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
        if not self._stores_ema:
            raise ValueError(
                "the average of a sharded model is sharded beside it, which "
                "ema.store_ema asks for; set it before the trainer is made"
            )
        sharded = self.model  # and its copy, made in the same moment
        return _sharding.ShardedEMA(self._average_model, sharded, self.cfg.ema)

    # Time

    def cumulative_training_time(self) -> float:
        """Return the seconds of training, those before a restart included."""
        if self._cumulative_training_time is not None:
            return self._cumulative_training_time
        return self._local_cumulative_training_time()


def _percent_clipped(limit: float, norm: float) -> float:
    return 100.0 if norm > limit else 0.0


def _smoothed(meters: Any, sample_size: Any) -> Any:
    """What a step returns of what it logged."""
    output = meters.get_smoothed_values()
    output["sample_size"] = sample_size
    for name in ("ppl", "wps", "wpb", "bsz"):
        output.pop(name, None)
    return output


_BLOCK = 64  # numbers in a collective
# Before the extra numbers: 1 for a rank that knows its keys, their hash, its square.
_EXTRAS = 3


def _extra_numbers(numbers: tuple[Any, ...]) -> list[float]:
    if _EXTRAS + len(numbers) > _BLOCK:
        raise ValueError(
            f"cannot sum {len(numbers)} numbers beside logs; at most {_BLOCK - _EXTRAS}"
        )
    return [float(number) for number in numbers]


def _in_blocks(values: list[float]) -> list[float]:
    """The values with zeros up to a multiple of a collective's numbers."""
    return values + [0.0] * (-len(values) % _BLOCK or (0 if values else _BLOCK))


def _total(logs: list[Any], key: str) -> float:
    """The sum of log[key] over the logs that have the key."""
    total = 0.0
    for value in (log[key] for log in logs if key in log):
        try:
            total += float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"the criterion logs a {type(value).__name__} as {key!r}, which cannot "
                "be summed over workers; let its logging_outputs_can_be_summed() "
                "return False"
            ) from None
    return total
