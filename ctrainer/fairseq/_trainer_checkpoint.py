"""fairseq's checkpoints: the trainer's state, failures, and the workers' own models.

With BMUF and SlowMo every worker updates a model of its own. The file holds the first
one's where fairseq has the model and the optimizer's state, and the others' beside it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from ctrainer import _C
from ctrainer.adapters import fairseq_parameters
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.adapters.nan_detector import NanDetector, nonfinite_grads
from ctrainer.checkpoint.files import is_there, naming
from ctrainer.fairseq import _sharding
from ctrainer.fairseq._lazy import plain
from ctrainer.fairseq._trainer_step import Step
from ctrainer.fairseq.checkpoint_utils import upgrade_state_dict
from ctrainer.fairseq.config.base import setting
from ctrainer.runtime.notes import locate

logger = logging.getLogger("ctrainer.fairseq.trainer")

WORKERS_KEY = "workers"  # of extra_state: by rank, None for the first
_PARTS = ("model", "criterion", "last_optimizer_state")
_AVERAGES = ("ema", "ema_fp32_params")
_BLOCKS = "bmuf"  # in the optimizer's state
# The keys of a block's state whose values all workers share.
_ALIKE = ("num_updates", "model", "momentum")

State = dict[str, Any]


def own_part(state: State) -> State:
    """The entries of a checkpoint's dictionary that are this worker's alone."""
    own = {name: state[name] for name in _PARTS}
    optimizer = state["last_optimizer_state"]
    if _BLOCKS in optimizer:
        blocks = {k: v for k, v in optimizer[_BLOCKS].items() if k not in _ALIKE}
        own["last_optimizer_state"] = {**optimizer, _BLOCKS: blocks}
    extra = state["extra_state"]
    return {**own, **{name: extra[name] for name in _AVERAGES if name in extra}}


def gathered(group: _C.Communicator, mine: Any, what: str, first: int = 0) -> list[Any]:
    """The values of the ranks from `first` on, in their order, on rank 0; a collective.

    One rank after the other sends, so that no more than one value is in memory twice.
    """
    found = []
    for rank in range(first, group.world_size):
        data = tools.to_bytes(mine) if rank == group.rank else None
        sent = group.broadcast_bytes(data, rank)
        if group.rank == 0:
            found.append(tools.from_bytes(sent, f"{what} of rank {rank}"))
    return found


def take_own(state: State, rank: int, workers: int, filename: str) -> State:
    """A checkpoint's dictionary with this worker's part in the place of the first's.

    Raises ValueError where another number of workers wrote it.
    """
    extra = state["extra_state"]
    saved = extra.get(WORKERS_KEY)
    if saved is None and workers == 1:
        return state
    if saved is None:
        logger.warning(
            "%s has the first worker's state alone, from which all resume: call "
            "consolidate_optimizer() on all workers before save_checkpoint()",
            filename,
        )
        return state
    if len(saved) != workers:
        raise ValueError(
            f"{filename} was written by {len(saved)} workers with models of their own, "
            f"and these are {workers}: run as many, or begin a block with the "
            "first worker's model (--reset-optimizer)"
        )
    own = saved[rank]
    if own is None:
        return state
    parts = {name: own[name] for name in _PARTS}
    optimizer = own["last_optimizer_state"]
    if _BLOCKS in optimizer:
        shared = state["last_optimizer_state"][_BLOCKS]
        alike = {k: v for k, v in shared.items() if k in _ALIKE}
        blocks = {**alike, **optimizer[_BLOCKS]}
        parts["last_optimizer_state"] = {**optimizer, _BLOCKS: blocks}
    averages = {name: own[name] for name in _AVERAGES if name in own}
    return {**state, **parts, "extra_state": {**extra, **averages}}


# The error-feedback residuals of gradients, in fairseq's checkpoints.


RESIDUALS_KEY = "residuals"  # of extra_state: a list by process
_OLD_RESIDUALS_KEY = "code_feedback"


def collect_residuals(module: Any, own: bool) -> list[Any]:
    """The residuals of every rank, on rank 0; with `own` of this rank alone. A
    collective, then not.

    As large as the gradients of the whole model, in float32, for each rank.
    """
    state = module.feedback_state_dict()
    return [state] if own else gathered(module.communicator, state, "the residuals")


def load_residuals(
    module: Any, extra_state: dict[str, Any], filename: str, own: bool
) -> None:
    """Resume with the list of collect_residuals(), from the same number of processes;
    else from 0, with a warning."""
    saved = extra_state.get(RESIDUALS_KEY) or extra_state.get(_OLD_RESIDUALS_KEY) or []
    expected = 1 if own else module.world_size
    if len(saved) != expected:
        logger.warning(
            "%s has the error-feedback residuals of %d processes, and these are %d: "
            "the residuals begin at 0",
            filename,
            len(saved),
            expected,
        )
        return
    module.load_feedback_state_dict(saved[0 if own else module.rank])


# fairseq's checkpoints: its dictionary, written whole or not at all.


_STUCK_SECONDS = 10.0  # of a GPU that other ranks may have left
_SLOWMO = "slowmo"  # of extra_state: what LocalDistributed has of its blocks


def plain_config(cfg: Any) -> Any:
    """A config as nested dicts of plain values, which loading need not trust."""
    if hasattr(cfg, "_content") or dataclasses.is_dataclass(cfg):
        from ctrainer.fairseq.config import to_dict

        return to_dict(cfg)
    if isinstance(cfg, Mapping):
        return {key: plain_config(value) for key, value in cfg.items()}
    if hasattr(cfg, "__dict__"):
        return {key: plain_config(value) for key, value in vars(cfg).items()}
    return cfg


def _checked(filename: str, state: Any) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise ValueError(
            f"{filename}: holds a {type(state).__name__}, and a checkpoint is a dict"
        )
    return state


def _plain_metrics(metrics: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The state of metrics with floats in place of numbers that are lazy."""
    for meters in metrics.values():
        for *_, state in meters:
            state.update({key: plain(value) for key, value in state.items()})
    return metrics


def _log_saved(filename: str) -> None:
    logger.info("Finished saving checkpoint to %s", filename)


class Checkpoints(Step):
    """state_dict(), save_checkpoint() and load_checkpoint()."""

    def consolidate_optimizer(self) -> None:
        """Bring the state of the optimizer to the first process, where each has a part
        or, with BMUF and SlowMo, a model of its own; then all call this before it is
        saved."""
        if self.data_parallel_world_size == 1:
            return
        if _sharding.shards_optimizer_state(self.cfg):
            self.optimizer.optimizer.consolidate_state_dict()
        if self._has_local_steps:
            mine = own_part(self._state_dict())
            others = gathered(self._communicator, mine, "the state", first=1)
            self._worker_states = (self.get_num_updates(), [None, *others])

    @property
    def _has_local_steps(self) -> bool:
        """Has each process a model of its own, that is to be saved with its updates?"""
        whole = not setting(self.cfg, "checkpoint", "no_save_optimizer_state")
        return self._has_own_model and self.data_parallel_world_size > 1 and whole

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in fairseq's layout; tensors are not copied.

        With BMUF and SlowMo the state of the other workers too, if
        consolidate_optimizer() has brought it here since the last update.
        """
        state = self._state_dict()
        if self._worker_states is not None:
            updates, states = self._worker_states
            self._worker_states = None
            if updates == self.get_num_updates():
                state["extra_state"][WORKERS_KEY] = states
        return state

    def _state_dict(self) -> dict[str, Any]:
        """The state without the parts of other processes."""
        self._await_update()
        state: dict[str, Any] = {
            "args": None,
            "cfg": plain_config(self.cfg),
            "model": self._weights_of(self.model if self.is_fsdp else self.get_model()),
            "criterion": self.get_criterion().state_dict() or None,
            "optimizer_history": [*(self._optim_history or []), self._history()],
            "task_state": self.task.state_dict() if self.task is not None else {},
            "extra_state": {
                "metrics": _plain_metrics(self._metrics.state_dict()),
                "previous_training_time": self.cumulative_training_time(),
            },
        }
        if self._stores_ema:
            state["extra_state"]["ema"] = self._weights_of(self.ema.get_model())
            if setting(self.cfg, "ema", "ema_fp32") and not self._saves_shards:
                state["extra_state"]["ema_fp32_params"] = self.ema.fp32_params
        if self._saves_shards:
            state["shard_metadata"] = _sharding.metadata_of(self.model)
        if not setting(self.cfg, "checkpoint", "no_save_optimizer_state"):
            state["last_optimizer_state"] = self._optimizer_state()
            if self._averages_models:
                state["extra_state"][_SLOWMO] = self.model.blocks_state_dict()
            if _sharding.reduces_quantized(self.cfg):
                residuals = collect_residuals(self.model, self._saves_shards)
                state["extra_state"][RESIDUALS_KEY] = residuals
        return state

    @property
    def _saves_shards(self) -> bool:
        return _sharding.saves_shards(self.cfg)

    def _weights_of(self, module: Any) -> Any:
        """The whole module's, or this process's part of them."""
        return module.local_state_dict() if self._saves_shards else module.state_dict()

    def _optimizer_state(self) -> Any:
        """Of whole parameters, with sharded ones None but on the first process; or of
        this process's shards."""
        state = self.optimizer.state_dict()
        if not self.is_fsdp or self._saves_shards:
            return state
        full = self.model.gather_full_optim_state_dict(self.optimizer.optimizer)
        return None if full is None else {**state, **full}

    def _history(self) -> dict[str, Any]:
        return {
            "criterion_name": type(self.get_criterion()).__name__,
            "optimizer_name": type(self.optimizer).__name__,
            "lr_scheduler_state": self.lr_scheduler.state_dict(),
            "num_updates": self.get_num_updates(),
        }

    def save_checkpoint(self, filename: str, extra_state: Any) -> str | None:
        """Write state_dict() with extra_state; return the absolute path, None on ranks
        that do not save.

        The file appears when it is whole. With write_checkpoints_asynchronously the
        state is copied and a thread writes it; the next save, load_checkpoint() and
        finish_saves() wait for that, and raise OSError where it has failed.

        Args:
            filename (str): The file.
            extra_state: A dict of more state.
        """
        if not self.should_save_checkpoint_on_current_rank:
            return None
        self.finish_saves()
        logger.info("Saving checkpoint to %s", filename)
        state = self.state_dict()
        state["extra_state"].update(extra_state)
        if setting(self.cfg, "checkpoint", "write_checkpoints_asynchronously"):
            self._saves.do(tools.file_to_save(filename, state))
            self._saves.do(lambda: _log_saved(filename))
        else:
            tools.save_file(filename, state)
            _log_saved(filename)
        return os.path.abspath(filename)

    def finish_saves(self) -> None:
        """Wait for what is written in the background; raise OSError where a file could
        not be."""
        self._saves.wait()

    def after_save(self, job: Callable[[], None]) -> None:
        """Run job() once the last save_checkpoint() has written its file: now, or in
        its thread.

        Args:
            job (Callable[[], None]): What to run.
        """
        if setting(self.cfg, "checkpoint", "write_checkpoints_asynchronously"):
            self._saves.do(job)
        else:
            job()

    def load_checkpoint(
        self,
        filename: str,
        reset_optimizer: bool = False,
        reset_lr_scheduler: bool = False,
        optimizer_overrides: dict[str, Any] | None = None,
        reset_meters: bool = False,
    ) -> dict[str, Any] | None:
        """Load what save_checkpoint() of this class or of fairseq's wrote.

        Of several processes all call this.

        Args:
            filename (str): The file.
            reset_optimizer (bool, default False): Leave optimizer, schedule and number
                of updates as they are.
            reset_lr_scheduler (bool, default False): Leave the schedule as it is.
            optimizer_overrides (dict[str, Any] | None, default None): Options that
                replace those of the optimizer's groups.
            reset_meters (bool, default False): Leave the meters as they are.

        Returns:
            extra_state, or None where there is no such file.

        Raises:
            Exception: the weights do not fit; the message says which.
            AssertionError: another criterion or optimizer wrote it.
        """
        self._await_update()
        self.finish_saves()
        self._optim_history = []
        logger.info("Preparing to load checkpoint %s", filename)
        state = self._read_checkpoint(filename)
        if state is None:
            logger.info("No existing checkpoint found %s", filename)
            return None
        with naming(filename):
            state = upgrade_state_dict(state)
        saved = state.get("last_optimizer_state")
        # Made first: it gives all workers the weights of the first.
        wrapper = self.model if self._averages_models else None
        if saved is not None and not reset_optimizer and self._has_own_model:
            rank, workers = self.data_parallel_rank, self.data_parallel_world_size
            state = take_own(state, rank, workers, filename)
        self._load_weights(filename, state)
        extra_state: dict[str, Any] | None = state.get("extra_state")
        if extra_state is not None:
            extra_state.pop(WORKERS_KEY, None)
        self._optim_history = state.get("optimizer_history") or []
        saved = state.get("last_optimizer_state")
        if saved is not None and not reset_optimizer:
            with naming(filename):
                self._load_optimizer(
                    saved, state["model"], reset_lr_scheduler, optimizer_overrides
                )
            if wrapper is not None:
                wrapper.load_blocks_state_dict((extra_state or {}).get(_SLOWMO, {}))
            if _sharding.reduces_quantized(self.cfg):
                load_residuals(
                    self.model, extra_state or {}, filename, self._saves_shards
                )
        if extra_state is not None:
            with naming(filename):
                self._load_extra_state(extra_state, reset_meters)
                self._load_ema(extra_state)
            logger.info(
                "Loaded checkpoint %s (epoch %s @ %s updates)",
                filename,
                extra_state.get("train_iterator", {}).get("epoch", 0),
                self.get_num_updates(),
            )
        return extra_state

    def _read_checkpoint(self, filename: str) -> dict[str, Any] | None:
        """The file's content, None where there is none. Of several processes the first
        reads it and sends it to the others, unless load_checkpoint_on_all_dp_ranks."""
        on_all = setting(self.cfg, "checkpoint", "load_checkpoint_on_all_dp_ranks")
        alone = self.data_parallel_world_size == 1 or on_all or self._saves_shards
        if alone:
            found = is_there(filename)
            return _checked(filename, tools.load_file(filename)) if found else None
        data, problem = b"", ""
        if self.is_data_parallel_master:
            data, problem = tools.read_bytes(filename)
        problem = self._communicator.broadcast_bytes(problem.encode()).decode()
        data = self._communicator.broadcast_bytes(data)
        if problem:
            raise OSError(f"rank 0 could not read {filename}: {problem}")
        return _checked(filename, tools.from_bytes(data, filename)) if data else None

    def _load_weights(self, filename: str, state: dict[str, Any]) -> None:
        try:
            if self._saves_shards:
                _sharding.load_shards(self.model, filename, state)
            elif self.is_fsdp:
                weights = fairseq_parameters.upgraded_weights(
                    self._model, state["model"]
                )
                self.model.load_state_dict(weights)
            else:
                tools.load_weights(self.get_model(), state["model"], self.cfg.model)
            if tools.has_parameters(self.get_criterion()):
                self.get_criterion().load_state_dict(state["criterion"], strict=True)
        except Exception as error:
            raise Exception(
                f"Cannot load model parameters from checkpoint {filename}; please "
                f"ensure that the architectures match. {type(error).__name__}: {error}"
            ) from error

    def _load_optimizer(
        self,
        saved: dict[str, Any],
        weights: dict[str, Any],
        reset_lr_scheduler: bool,
        overrides: Any,
    ) -> None:
        if not self._optim_history:
            raise ValueError(
                "the checkpoint has an optimizer's state and no optimizer_history; "
                "reset the optimizer (--reset-optimizer)"
            )
        self._build_optimizer()
        last, now = self._optim_history[-1], self._history()
        for name in ("criterion", "optimizer"):
            old, new = last[f"{name}_name"], now[f"{name}_name"]
            assert new == old, (
                f"{name.capitalize()} does not match; please reset the optimizer "
                f"(--reset-optimizer). {old} vs {new}"
            )
        if not reset_lr_scheduler:
            self.lr_scheduler.load_state_dict(last["lr_scheduler_state"])
        if not self.is_fsdp:
            shapes = [parameter.shape for parameter in self.optimizer.params]
            saved = fairseq_parameters.state_in_order(
                saved, self.get_model(), weights, shapes
            )
        elif not self._saves_shards:
            names = _sharding.parameter_names(self.model)
            saved = fairseq_parameters.sharded_state_in_order(
                saved, self._model, weights, names
            )
            saved = self.model.get_shard_from_optim_state_dict(saved)
        self.optimizer.load_state_dict(saved, overrides)
        self.set_num_updates(last["num_updates"])

    def _load_extra_state(self, extra: dict[str, Any], reset_meters: bool) -> None:
        itr = extra.get("train_iterator", {})
        if "previous_training_time" in extra:
            self._previous_training_time = extra["previous_training_time"]
            self._start_time = time.time()
        self.lr_step(itr.get("epoch", 0))
        at_the_end = itr.get("version", 1) >= 2 and not itr.get("iterations_in_epoch")
        if "metrics" in extra and not reset_meters:
            self._metrics.load_state_dict(extra["metrics"])
            if at_the_end:  # those of the epoch are over; fairseq forgets all
                self._metrics.reset_meters("train")
            for meter in (self._metrics.get_meters("default") or {}).values():
                if isinstance(meter, self._metrics.TimeMeter):
                    meter.reset()

    def _load_ema(self, extra: dict[str, Any]) -> None:
        if not self._stores_ema:
            return
        fp32 = setting(self.cfg, "ema", "ema_fp32")
        if "ema" not in extra:
            logger.warning(
                "EMA not found in checkpoint. But store_ema is True. EMA is "
                "re-initialized from checkpoint."
            )
        if self._saves_shards:
            self._load_sharded_ema(extra)
            return
        model = self.model if self.is_fsdp else self.get_model()
        weights = extra["ema"] if "ema" in extra else model.state_dict()
        self.ema.restore(weights, build_fp32_params=fp32)
        if fp32 and "ema_fp32_params" in extra:
            self.ema.restore(extra["ema_fp32_params"], build_fp32_params=True)

    def _load_sharded_ema(self, extra: dict[str, Any]) -> None:
        own = extra["ema"] if "ema" in extra else self.model.local_state_dict()
        self.ema.get_model().load_local_state_dict(own)


# The files and messages of an update that failed, and its repetition.


class Failures(Checkpoints):
    """Reports of the C half: out of memory, crash.pt, and where NaN comes from."""

    def _log_oom(self, error: BaseException, in_update: bool = False) -> None:
        logger.warning("OOM: Ran out of memory with exception: %s", error)
        for summary in tools.memory_summaries():
            logger.warning(summary)
        if in_update:
            logger.error("OOM during optimization, irrecoverable")
        sys.stderr.flush()

    def crash_extra_state(self) -> dict[str, Any]:
        """Return what crash.pt has in extra_state beside the trainer's own: the
        position in the data. A program that keeps more, such as the best metric,
        overrides it."""
        itr = self._epoch_itr
        return {} if itr is None else {"train_iterator": itr.state_dict()}

    def _report_failure(
        self,
        error: BaseException,
        samples: list[Any],
        place: int | None,
        rng: Any,
        enqueued: bool,
    ) -> None:
        """After an exception in train_step(): crash.pt and, where numbers of the update
        are not finite, their source. place: of the sample that failed; None: the
        failure was in the update. rng: states of the generators before. enqueued: the
        update has been counted, and the gradients are others' by now."""
        if enqueued:
            self.set_num_updates(self.get_num_updates() - 1)
            self.zero_grad()
        locate(error, "fairseq", (self, "update", samples, place))
        try:
            self._save_crash(error, samples, place, rng)
        finally:
            if place is None and isinstance(error, FloatingPointError):
                self._find_nonfinite(error, samples, rng)

    def _save_crash(
        self, error: BaseException, samples: list[Any], place: int | None, rng: Any
    ) -> None:
        """Write crash.pt, unless the trainer has not got as far as an optimizer."""
        if self._optimizer is None:
            return
        if not isinstance(error, ArithmeticError):
            self._leave_stuck_groups()
        folder = setting(self.cfg, "checkpoint", "save_dir", "checkpoints")
        rank = self.data_parallel_rank
        path = os.path.join(folder, f"crash.rank{rank}.pt" if rank else "crash.pt")
        try:
            os.makedirs(folder, exist_ok=True)
            tools.save_file(path, self._crash_state(error, samples, place, rng))
        except Exception:
            logger.exception("%s could not be written", path)
            return
        logger.error(
            "update %s failed; `ctrainer replay %s` repeats it",
            self.get_num_updates() + 1,
            path,
        )

    def _leave_stuck_groups(self) -> None:
        """Where another rank has failed, this one's GPU may wait for its part of a
        collective until the time-out, and a copy of the weights would, too: then this
        rank leaves."""
        groups = self._groups_on_gpus()
        if groups and not tools.is_idle_within(_STUCK_SECONDS):
            self._in_doubt = self._enqueued_engine is not None
            for group in groups:
                group.close()  # which aborts what the streams wait for

    def _crash_state(
        self, error: BaseException, samples: list[Any], place: int | None, rng: Any
    ) -> dict[str, Any]:
        """A checkpoint of before the update, and what made it fail."""
        state = self.state_dict()
        state["extra_state"].update(self.crash_extra_state())
        state["crash"] = {
            "samples": samples,
            "dummy_batch": self._dummy_batch,
            "failed_sample": place,
            "error": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(error)),
            "rng": rng,
            "folder": os.getcwd(),
        }
        return state

    def _find_nonfinite(
        self, error: BaseException, samples: list[Any], rng: Any
    ) -> None:
        """Name the gradients that are not finite, then repeat the update's forward and
        backward, with the same random numbers, to name what was the first."""
        bad = nonfinite_grads(self.get_model())
        tools.set_rng_state(rng)
        with NanDetector(self._watched()) as detector:
            self._repeat_step(samples)
        bad = bad or nonfinite_grads(self.get_model())
        if bad:
            logger.error(
                "gradients of %s parameters are not finite: %s%s",
                len(bad),
                ", ".join(bad[:5]),
                ", ..." if len(bad) > 5 else "",
            )
        first = (
            f"first not finite: {detector.findings[0]}"
            if detector.findings
            else ("a second run of the update met nothing that is not finite")
        )
        logger.error(first)
        error.add_note(first)

    def _watched(self) -> dict[str, Any]:
        return {"model": self.get_model(), "criterion": self.get_criterion()}
