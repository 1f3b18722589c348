"""fairseq's checkpoints: its dictionary, written whole or not at all."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ctrainer.adapters import fairseq_parameters
from ctrainer.adapters import torch_fairseq as tools
from ctrainer.checkpoint.files import is_there, naming
from ctrainer.fairseq import _code_feedback, _sharding, _worker_states, _zero
from ctrainer.fairseq._checkpoint_upgrade import upgrade_state_dict
from ctrainer.fairseq._trainer_checks import setting
from ctrainer.fairseq._trainer_core import Core

logger = logging.getLogger("ctrainer.fairseq.trainer")

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


def _log_saved(filename: str) -> None:
    logger.info("Finished saving checkpoint to %s", filename)


class Checkpoints(Core):
    """state_dict(), save_checkpoint() and load_checkpoint()."""

    def consolidate_optimizer(self) -> None:
        """Bring the state of the optimizer to the first process, where each has a part
        or, with BMUF and SlowMo, a model of its own; then all call this before it is
        saved."""
        if self.data_parallel_world_size == 1:
            return
        if _zero.is_wanted(self.cfg):
            self.optimizer.optimizer.consolidate_state_dict()
        if self._trains_apart:
            mine = _worker_states.own_part(self._state_dict())
            states = _worker_states.collect(self._communicator, mine)
            self._worker_states = (self.get_num_updates(), states)

    @property
    def _trains_apart(self) -> bool:
        """Has each process a model of its own, that is to be saved with its updates?"""
        whole = not setting(self.cfg, "checkpoint", "no_save_optimizer_state", False)
        return self._has_own_model and self.data_parallel_world_size > 1 and whole

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in fairseq's layout; tensors are not copied.

        With BMUF and SlowMo that of the other workers too, if consolidate_optimizer()
        has brought it here since the last update."""
        state = self._state_dict()
        if self._worker_states is not None:
            updates, states = self._worker_states
            self._worker_states = None
            if updates == self.get_num_updates():
                state["extra_state"][_worker_states.KEY] = states
        return state

    def _state_dict(self) -> dict[str, Any]:
        """What this process has of it."""
        state: dict[str, Any] = {
            "args": None,
            "cfg": plain_config(self.cfg),
            "model": self._weights_of(self.model if self.is_fsdp else self.get_model()),
            "criterion": self.get_criterion().state_dict() or None,
            "optimizer_history": [*(self._optim_history or []), self._history()],
            "task_state": self.task.state_dict() if self.task is not None else {},
            "extra_state": {
                "metrics": self._metrics.state_dict(),
                "previous_training_time": self.cumulative_training_time(),
            },
        }
        if setting(self.cfg, "ema", "store_ema", False):
            state["extra_state"]["ema"] = self._weights_of(self.ema.get_model())
            if setting(self.cfg, "ema", "ema_fp32", False) and not self._saves_shards:
                state["extra_state"]["ema_fp32_params"] = self.ema.fp32_params
        if self._saves_shards:
            state["shard_metadata"] = _sharding.metadata_of(self.model)
        if not setting(self.cfg, "checkpoint", "no_save_optimizer_state", False):
            state["last_optimizer_state"] = self._optimizer_state()
            if self._averages_models:
                state["extra_state"][_SLOWMO] = self.model.blocks_state_dict()
            if _sharding.reduces_to_codes(self.cfg):
                missed = _code_feedback.collect(self.model, self._saves_shards)
                state["extra_state"][_code_feedback.KEY] = missed
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
        """Write state_dict() with extra_state; return the absolute path.

        The file appears when it is whole. With write_checkpoints_asynchronously the
        state is copied and a thread writes it; the next save, load_checkpoint() and
        finish_saves() wait for that, and raise OSError where it has failed.
        """
        if not self.should_save_checkpoint_on_current_rank:
            return None
        self.finish_saves()
        logger.info("Saving checkpoint to %s", filename)
        state = self.state_dict()
        state["extra_state"].update(extra_state)
        if setting(self.cfg, "checkpoint", "write_checkpoints_asynchronously", False):
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
        the thread that writes it."""
        if setting(self.cfg, "checkpoint", "write_checkpoints_asynchronously", False):
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
        """Load what save_checkpoint() of ours or of fairseq's wrote.

        reset_optimizer leaves optimizer, schedule and number of updates as they are;
        optimizer_overrides replaces options of its groups. Returns extra_state, or
        None where there is no such file. Of several processes all call this.

        Raises:
            Exception: the weights do not fit; the message says which.
            AssertionError: another criterion or optimizer wrote it.
        """
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
            state = _worker_states.take_own(state, rank, workers, filename)
        self._load_weights(filename, state)
        extra_state: dict[str, Any] | None = state.get("extra_state")
        if extra_state is not None:
            extra_state.pop(_worker_states.KEY, None)
        self._optim_history = state.get("optimizer_history") or []
        saved = state.get("last_optimizer_state")
        if saved is not None and not reset_optimizer:
            with naming(filename):
                self._load_optimizer(
                    saved, state["model"], reset_lr_scheduler, optimizer_overrides
                )
            if wrapper is not None:
                wrapper.load_blocks_state_dict((extra_state or {}).get(_SLOWMO, {}))
            if _sharding.reduces_to_codes(self.cfg):
                _code_feedback.load(
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
        on_all = setting(
            self.cfg, "checkpoint", "load_checkpoint_on_all_dp_ranks", False
        )
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
        if not setting(self.cfg, "ema", "store_ema", False):
            return
        fp32 = setting(self.cfg, "ema", "ema_fp32", False)
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
