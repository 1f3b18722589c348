"""Trainer: what happens before the first batch and after the last."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from typing import Any

from ctrainer import _C
from ctrainer.arguments import accelerator
from ctrainer.arguments.loss_scaler import make_loss_scaler
from ctrainer.checkpoint.files import naming
from ctrainer.comm import world
from ctrainer.trainer.blocks import BlocksMixin
from ctrainer.trainer.data import DataMixin
from ctrainer.trainer.extra import ExtraMixin
from ctrainer.trainer.optim import OptimMixin
from ctrainer.trainer.search import SearchMixin
from ctrainer.trainer.shards import ShardsMixin, is_on_meta
from ctrainer.trainer_state import TrainerState, is_exportable
from ctrainer.trainer_utils import (
    TrainOutput,
    enable_full_determinism,
    has_length,
    seed_loaded,
    set_seed,
    speed_metrics,
)

logger = logging.getLogger("ctrainer.trainer")


class RunMixin(
    ShardsMixin, BlocksMixin, DataMixin, ExtraMixin, OptimMixin, SearchMixin
):
    """Preparation and end of train(); the loop between them is C."""

    def _join_ranks(self) -> _C.Communicator:
        """The group of the run's ranks, which C keeps as _communicator."""
        alone = self.args.world_size == 1
        return _C.Communicator() if alone else world(self.args.ddp_timeout)

    def _leave_ranks(self) -> None:
        """After a failure: close the group, so that no rank waits for this one."""
        try:
            self._communicator.close()
        except RuntimeError as error:  # a collective is under way
            logger.warning("the group of the run stays open: %s", error)

    def _ranks_differ(self, what: str, told: list[bytes]) -> None:
        """Raise on every rank what all of them have, unless that may differ: where
        batches need not be even, or rank 0 alone reads them."""
        config = accelerator.config_of(getattr(self.args, "accelerator_config", None))
        dispatches = config.dispatch_batches
        if dispatches is None:
            dispatches = not hasattr(self.train_dataset, "__getitem__")
        if not config.even_batches or dispatches:
            return
        each = ", ".join(
            f"rank {rank} {text.decode()}" for rank, text in enumerate(told)
        )
        raise ValueError(
            f"{what}: {each}. Give all ranks the same training data, of which each "
            "gets its part, or set accelerator_config={'even_batches': False}, by "
            "which an epoch ends where the first rank has no batch left"
        )

    def _train_arguments(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """The arguments of train(), with transformers 4's `model_path`."""
        if "model_path" in kwargs:
            resume_from_checkpoint = kwargs.pop("model_path")
        if kwargs:
            raise TypeError(f"train() got unexpected arguments: {', '.join(kwargs)}")
        return resume_from_checkpoint, trial, ignore_keys_for_eval

    def _begin_train(self, resume: str | bool | None, trial: Any) -> Any:
        """Ready the model and load the checkpoint's weights; return its folder."""
        args = self.args
        self.is_in_train = True
        self._reader = None
        self._memory_tracker.start("train")
        self._handles_signals = (
            getattr(args, "save_on_signal", True)
            and threading.current_thread() is threading.main_thread()
        )
        if self._inputs_stay and getattr(args, "malloc_tuning", True):
            _C.malloc_tune(True)
        self._hp_search_setup(trial)
        if self.model_init is not None:
            self._seed()
            self.model = self.model_wrapped = self.call_model_init(trial)
            self.optimizer = self.lr_scheduler = self._shard_group = None
        if self._adapter.is_data_parallel(self.model_wrapped):
            self.model_wrapped = self.model  # of the run before
        self._move_model_to_device(self.model, args.device)
        self._ready_model()
        folder = self._resolve_checkpoint(resume)
        if folder is not None:
            self._load_from_checkpoint(folder)
        return folder

    def _ready_model(self) -> None:
        """Gradient checkpointing and noise on embeddings, where asked for."""
        if self.args.gradient_checkpointing:
            kwargs = self.args.gradient_checkpointing_kwargs
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=dict(kwargs) if kwargs else None
            )
        if self.neftune_noise_alpha is not None:
            self._neftune = self._adapter.add_embedding_noise(
                self.model, self.neftune_noise_alpha
            )

    def _seed(self) -> None:
        """Seed the generators, torch's too where a model of torch may be made."""
        if self.model_init is None and "torch" not in sys.modules:
            seed_loaded(self.args.seed)
        else:
            full = self.args.full_determinism
            (enable_full_determinism if full else set_seed)(self.args.seed)

    def _resolve_checkpoint(self, resume: str | bool | None) -> str | None:
        if resume is None or resume is False:
            return None
        if resume is True:
            found = self._last_checkpoint()
            if found is None:
                raise ValueError(
                    f"resume_from_checkpoint=True, but {self.args.output_dir} holds no "
                    "whole checkpoint; train without it, or name a folder"
                )
            return str(found)
        folder = os.fspath(resume)
        if not os.path.isdir(folder):
            raise ValueError(
                f"resume_from_checkpoint: no folder {folder!r}; give a checkpoint's "
                "folder, or True for the newest in output_dir"
            )
        return folder

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """Return how long the run is: (num_train_epochs, num_update_steps_per_epoch,
        num_examples, num_train_samples, total_train_batch_size, steps_in_epoch,
        max_steps). A step in an epoch is a micro-batch.

        Raises ValueError where neither max_steps nor the loader's length says.
        """
        total = self.get_total_train_batch_size(args)
        length = len(dataloader) if has_length(dataloader) else None
        if not length:
            if args.max_steps <= 0:
                raise ValueError(
                    "the training data has no length, so max_steps must say how many "
                    f"updates to make; it is {args.max_steps}"
                )
            micro = args.max_steps * args.gradient_accumulation_steps
            samples = total * args.max_steps
            return (
                sys.maxsize,
                args.max_steps,
                samples,
                samples,
                total,
                micro,
                args.max_steps,
            )
        updates = max(math.ceil(length / args.gradient_accumulation_steps), 1)
        examples = self.num_examples(dataloader)
        if args.max_steps > 0:
            epochs = math.ceil(args.max_steps / updates)
            samples = args.max_steps * total
            return epochs, updates, examples, samples, total, length, args.max_steps
        steps = math.ceil(args.num_train_epochs * updates)
        samples = examples * args.num_train_epochs
        epochs = math.ceil(args.num_train_epochs)
        return epochs, updates, examples, samples, total, length, steps

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples an update sees: micro-batch times accumulation times workers."""
        return int(
            self._train_batch_size * args.gradient_accumulation_steps * args.world_size
        )

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """A new state, or the checkpoint's; return the epoch and the micro-batch of it
        to begin with."""
        stateful = [
            c
            for c in [*self.callback_handler.callbacks, self.control]
            if is_exportable(c)
        ]
        self.state = TrainerState(stateful_callbacks=stateful)
        self.state.is_hyper_param_search = trial is not None
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, max_steps)
        self._set_loss_state()
        self._resume_state = {}
        position = (0, 0)
        if resume_from_checkpoint is not None:
            self._load_trainer_state(resume_from_checkpoint)
            position = self._position(num_update_steps_per_epoch)
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        self._globalstep_last_logged = self.state.global_step
        return position

    def _position(self, updates_per_epoch: int) -> tuple[int, int]:
        """Epoch and micro-batch that the loaded checkpoint stands at."""
        data = self._resume_state.get("data")
        if data is not None:
            place = 0 if self.args.ignore_data_skip else int(data["place"])
            done = 0 < (data.get("length") or 0) <= int(data["place"])
            return (int(data["epoch"]) + 1, 0) if done else (int(data["epoch"]), place)
        epoch, updates = divmod(self.state.global_step, updates_per_epoch)
        skipped = 0 if self.args.ignore_data_skip else updates
        return epoch, skipped * self.args.gradient_accumulation_steps

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """Optimizer, schedule and the wrapped model; the checkpoint's state of them."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._shard_model(resume_from_checkpoint)
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self._check_optimizer()
        self._make_blocks()
        model = self._wrap_model(self.model_wrapped)
        self.model_wrapped = model
        self._syncs_each_batch = accelerator.syncs_each_batch(self.args)
        self._loss_scaler = self._make_loss_scaler()
        self._make_weight_average()
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
            self._load_weight_average(resume_from_checkpoint)
            self._load_blocks(resume_from_checkpoint)
        self._schedule_on_metric = self._adapter.is_metric_scheduler(self.lr_scheduler)
        if self._schedule_on_metric and self.args.eval_strategy == "no":
            logger.warning(
                "%s is stepped when an evaluation ends, and eval_strategy is 'no': the "
                "learning rate will not change.",
                type(self.lr_scheduler).__name__,
            )
        self._stray_parameters = self._adapter.stray_parameters(
            self.model, self.optimizer
        )
        if self._shard_group is None:
            self._flos_per_token = self._adapter.flos_per_token(self.model)
        self._main_input_name = getattr(self.model, "main_input_name", "input_ids")
        self._train_mode(model)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._reserve_snapshot()
        return model, train_dataloader

    def _make_loss_scaler(self) -> _C.LossScaler | None:
        """The scale of an fp16 run's loss, as args.loss_scaler says; None without."""
        if not self.args.fp16:
            return None
        name = self._adapter.lossy_fp16_parameter(self.model, self.optimizer)
        if name is not None:
            raise ValueError(
                f"fp16=True trains float32 parameters, and {name} is float16, in which "
                "small updates vanish: load the model with dtype=torch.float32, or "
                "set master_weights=True, which updates float32 copies"
            )
        scaler = make_loss_scaler(self.args.loss_scaler)
        return scaler if scaler.enabled else None

    def _train_mode(self, model: Any) -> None:
        """Put model and optimizer (schedule-free ones have modes) into train mode."""
        for part in (model, self.optimizer):
            if callable(getattr(part, "train", None)):
                part.train()

    def _start_clock(self) -> float:
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        return time.time()

    def _epoch_iterator(
        self, loader: Any, epoch: int, skip: int, checkpoint: str | None
    ) -> Any:
        """Batches of the epoch from number `skip` on.

        The generators' states at the beginning of the epoch are kept for checkpoints:
        a run resumed in its middle starts the epoch with them, so that its order is
        the same, and then takes those of the moment of saving. One resumed between two
        epochs starts with those.
        """
        began = self._resume_state.get("epoch_rng") if checkpoint and skip else None
        if began is not None:
            assert checkpoint is not None
            with naming(os.path.join(checkpoint, self._own_state_file())):
                self._adapter.set_rng_state(began)
        else:
            if checkpoint and not skip:
                self._pass_epoch_before(loader, epoch)
            self._load_rng_state(None if skip else checkpoint)
            self._resume_state["epoch_rng"] = self._adapter.rng_state()
        if self._communicator.world_size > 1:
            self._adapter.share_order(loader, self._communicator)
        known = self._resume_state.pop("data", None) if checkpoint and skip else None
        reader = self._reader_of(loader)
        self._adapter.set_epoch(loader, epoch)
        iterator = reader.start(epoch, skip, known)
        if skip:
            self._load_rng_state(checkpoint)
        return iterator

    def _pass_epoch_before(self, loader: Any, epoch: int) -> None:
        """Let the loader's own generators go where the epoch that the checkpoint ends
        has left them; no row is read."""
        data = self._resume_state.get("data") or {}
        if data.get("generators") and data["epoch"] == epoch - 1:
            self._adapter.set_epoch(loader, epoch - 1)
            self._reader_of(loader).pass_epoch(data)

    def _reader_of(self, loader: Any) -> Any:
        if self._reader is None or self._reader.loader is not loader:
            self._reader = self._make_reader(loader)
        return self._reader

    def _make_reader(self, loader: Any) -> Any:
        """What reads epochs of the loader, with the draws that
        dataloader_seed_by_place asks for."""
        args = self.args
        seed: int | None = None
        if getattr(args, "dataloader_seed_by_place", True):
            seed = int(args.seed if args.data_seed is None else args.data_seed)
        group = self._communicator
        return self._adapter.reader(loader, seed, group.rank, group.world_size)

    def _evaluation_batches(self, loader: Any) -> Any:
        """An evaluation's batches, which draw alike each time, by their place: what
        they draw changes neither the training that follows nor what a resumed run
        finds."""
        if not getattr(self.args, "dataloader_seed_by_place", True):
            return loader
        return self._make_reader(loader).evaluate(self._reader)

    def _saves_best_only(self) -> bool:
        """Does an evaluation decide whether this step is saved?"""
        return bool(self.args.save_strategy == "best")

    def _save_on_signal(self, model: Any, trial: Any) -> None:
        """The checkpoint that Ctrl-C or SIGTERM asks for, unless this step has one."""
        step = self.state.global_step
        if self._saved_step != step and step > 0:
            logger.warning("Asked to stop: saving a checkpoint of step %d first.", step)
            self._save_atomically(model, trial)
        self._wait_for_save()

    def _finalize_training(
        self, trial: Any, num_train_samples: int, start_time: float
    ) -> TrainOutput:
        """The last block, metrics of the run, the best model, on_train_end."""
        self._end_blocks()
        loss = self._training_loss()
        metrics = speed_metrics(
            "train", start_time, num_samples=num_train_samples,
            num_steps=self.state.max_steps,
        )  # fmt: skip
        self.store_flos()
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = loss
        skipped = self._loss_state()["nonfinite_total"]
        if skipped:
            metrics["nonfinite_steps"] = skipped
        self._memory_tracker.stop_and_update_metrics(metrics, "train")
        self.log(metrics)
        self._together("saving the last checkpoint", self._wait_for_save)
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()  # a schedule-free one leaves its average in the model
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best_model()
        self.control = self.callback_handler.on_train_end(
            self.args, self.state, self.control
        )
        return TrainOutput(self.state.global_step, loss, metrics)

    def _end_train(self, whole: bool) -> None:
        """Undo what training did to the model; finish the saves that are under way."""
        self.is_in_train = False
        if whole:
            self._resume_state = self._where()
        if self._reader is not None:
            self._reader.close()  # and the data loader's workers, if it has any
            self._reader = None
        self._memory_tracker.cur_stage = None
        self._adapter.leave_mixed_precision(self.model)
        if getattr(self, "_neftune", None) is not None:
            self._neftune.remove()
            self._neftune = None
        self._wait_for_save(release=True)

    def _wrap_model(
        self, model: Any, training: bool = True, dataloader: Any = None
    ) -> Any:
        """`model` as it is run: compiled, under mixed precision, where args say so, and
        on several ranks with gradients that become their mean, unless these train
        apart."""
        if model is not self.model:
            return model
        self._check_has_values(model)
        self._adapter.enter_mixed_precision(model, self.args)
        if training and self.args.torch_compile:
            model = self._adapter.compile_model(model, self.args)
        apart = self._blocks is not None or self._shard_group is not None
        if training and self.args.world_size > 1 and not apart:
            model = self._adapter.data_parallel(model, self.args, self._communicator)
        return model

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if self.place_model_on_device and not is_on_meta(model):
            self._adapter.move_model(model, device)

    def call_model_init(self, trial: Any = None) -> Any:
        """A fresh model from model_init, which takes no argument or the trial."""
        assert self.model_init is not None
        import inspect

        takes = len(inspect.signature(self.model_init).parameters)
        if takes > 1:
            raise RuntimeError(
                f"model_init must take no argument or one (the trial), not {takes}"
            )
        model = self.model_init(trial) if takes else self.model_init()
        if model is None:
            raise RuntimeError("model_init returned None; it must return a model")
        return model
