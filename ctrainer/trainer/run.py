"""Trainer: what happens before the first batch and after the last."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ctrainer import (
    _C,
    adapters,
    average,
    deepspeed_schedules,
    integrations,
    throughput,
)
from ctrainer.arguments import accelerator, deepspeed
from ctrainer.arguments.loss_scaler import make_loss_scaler
from ctrainer.arguments.settings import reject_keywords
from ctrainer.comm.run import end_standby, world
from ctrainer.display.terminal import release
from ctrainer.runtime import messages
from ctrainer.runtime.hooks import check_optimizer_made
from ctrainer.runtime.stop import end_by
from ctrainer.trainer import (
    best,
    blocks,
    checkpoint,
    data,
    evaluation,
    memory,
    search,
    shards,
    step,
    survivors,
)
from ctrainer.trainer.base import TrainerBase
from ctrainer.trainer.checkpoint import set_mode
from ctrainer.trainer.shards import is_on_meta
from ctrainer.trainer_utils import (
    TrainOutput,
    enable_full_determinism,
    has_length,
    seed_loaded,
    set_seed,
)

logger = logging.getLogger("ctrainer.trainer")


class TrainerRun(TrainerBase):
    """Preparation and end of train(), whose loop is C, and transformers' hooks.

    What subclasses may override is a method here and is called on the instance. Those
    of a concept are functions of its module: data, checkpoint, shards, blocks, search
    and evaluation.
    """

    def _join_ranks(self) -> _C.Communicator:
        """The group of the run's ranks, which C keeps as _communicator."""
        alone = self.args.world_size == 1
        return _C.Communicator() if alone else world(self.args.ddp_timeout)

    def _ranks_differ(self, what: str, own: str) -> None:
        """Raise on every rank what all of them have, unless that may differ: where
        batches need not be even, or rank 0 alone reads them."""
        texts = self._together(what, lambda: own.encode())
        config = accelerator.config_of(getattr(self.args, "accelerator_config", None))
        dispatches = config.dispatch_batches
        if dispatches is None:
            dispatches = not hasattr(self.train_dataset, "__getitem__")
        if not config.even_batches or dispatches:
            return
        each = ", ".join(
            f"rank {rank} {text.decode()}" for rank, text in enumerate(texts)
        )
        raise ValueError(
            f"{what}: {each}. Give all ranks the same training data, of which each "
            "gets its part, or set accelerator_config={'even_batches': False}, by "
            "which an epoch ends where the first rank has no batch left"
        )

    # One run: before the loop, and after it

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train the model and return TrainOutput(global_step, training_loss, metrics).

        The run continues in the middle of the epoch with the same losses as one that
        was never stopped. Ctrl-C and SIGTERM leave a checkpoint of the last whole
        update first; a second one ends the process at once.

        Args:
            resume_from_checkpoint (str | bool | None, default None): A folder, or True
                for the newest whole checkpoint in args.output_dir.
            trial (default None): Of a hyperparameter search; else None.
            ignore_keys_for_eval (list[str] | None, default None): Outputs of the model
                that evaluations drop.
            **kwargs: model_path, transformers 4's name of resume_from_checkpoint.

        Raises:
            TypeError: another keyword.
            KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM has stopped the run.
        """
        if "model_path" in kwargs:  # of transformers 4
            resume_from_checkpoint = kwargs.pop("model_path")
        reject_keywords("train", TrainerRun.train, kwargs)
        resume = resume_from_checkpoint
        while True:
            try:
                output, number = self._train_once(resume, trial, ignore_keys_for_eval)
                break
            except BaseException as error:
                resume = survivors.resume_after(self, error, resume)
        end_standby()
        self._end_train(True)
        if number:
            said = logger if self.is_world_process_zero() else None
            end_by(number, said, checkpoint.how_to_resume(self, trial))
        return output

    def _train_once(
        self, resume: str | bool | None, trial: Any, ignore_keys: list[str] | None
    ) -> tuple[Any, int]:
        """Run the loop; its output, and the signal that has stopped it or 0."""
        folder = self._begin_train(resume, trial)
        return self._call_loop(
            lambda: self._inner_training_loop(
                batch_size=self._train_batch_size,
                args=self.args,
                resume_from_checkpoint=folder,
                trial=trial,
                ignore_keys_for_eval=ignore_keys,
            )
        )

    def _leave_run(self) -> None:
        """After a failure: close the group, so that no rank waits for this one."""
        try:
            self._leave_ranks()
        except RuntimeError as error:  # a collective is under way
            logger.warning("the group of the run stays open: %s", error)
        survivors.leave_wrapper(self)
        self._end_train(False)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Run all epochs and return a TrainOutput; train() has resolved the
        checkpoint."""
        self._run = run = _C.Run()
        run.args = self.args if args is None else args
        run.checkpoint, run.trial = resume_from_checkpoint, trial
        run.ignore_keys = ignore_keys_for_eval
        self._prepare_run(run)
        run.accumulation = int(self.args.gradient_accumulation_steps)
        integrations.follow_run(self)
        self.control = self.callback_handler.on_train_begin(
            self.args, self.state, self.control
        )
        if self.args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        self._run_epochs(run)
        samples, _ = self._sum_over_ranks(run.samples, 0)
        return self._finalize_training(run.trial, int(samples), run.start_time)

    def _prepare_run(self, run: _C.Run) -> None:
        """Fill in the run: its length, its place and the model, all of it ready."""
        run.loader = self.get_train_dataloader()
        values = self._call_hook(
            "set_initial_training_values", run.args, run.loader,
            total_train_batch_size=self.get_total_train_batch_size(run.args),
        )  # fmt: skip
        if not isinstance(values, tuple) or len(values) != 7:
            raise TypeError(
                "set_initial_training_values must return a tuple of 7 values, got "
                f"{values!r}"
            )
        run.epochs, run.updates_in_epoch, rows, _, total, steps, run.max_steps = values
        if isinstance(total, bool):  # transformers 4's epoch_based
            total = self.get_total_train_batch_size(run.args)
            if steps is None:
                steps = run.max_steps * run.args.gradient_accumulation_steps
        run.steps_in_epoch = steps
        if self._communicator.world_size > 1:
            self._agree_on_length(run, rows)
        run.epoch, run.micro_step = self._init_training_state(
            run.max_steps, run.updates_in_epoch, run.epochs, run.checkpoint, run.trial
        )
        if run.args.max_steps > 0:  # the epochs before may have had other lengths
            left = run.max_steps - self.state.global_step
            left += run.micro_step // run.args.gradient_accumulation_steps
            more = math.ceil(left / run.updates_in_epoch)
            run.epochs = max(run.epochs, run.epoch + more)
        run.model, run.loader = self._prepare_for_training(
            run.max_steps, run.loader, run.checkpoint
        )
        step.drop_gradients(self)
        messages.running(self, run, rows, total)
        self._first_place = run.epoch, run.micro_step
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        run.start_time = time.time()

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        """Train for one epoch of the run that is under way, and do what is due at its
        end. Hook, called after on_epoch_begin.

        The model and the loader may be others than those that the hook got; the other
        arguments say where the run is.
        """
        run = self._run
        if run is None:
            raise RuntimeError("_run_epoch() is a part of train(): call that")
        run.model, run.loader = model, train_dataloader
        self._train_epoch(run)

    def _agree_on_length(self, run: _C.Run, rows: Any) -> None:
        """Make the run as long as the shortest of the ranks' loaders, with as many
        epochs as that needs; longer ones warn of what they do not train on. Unless the
        arguments allow that, all ranks raise, naming each rank's rows and batches."""
        rows, own = rows if isinstance(rows, int) else -1, run.steps_in_epoch
        values = [rows, own, run.updates_in_epoch, run.max_steps, run.epochs]
        texts = self._together(
            "comparing the length of the ranks' training data",
            lambda: json.dumps(values).encode(),
        )
        each = list(zip(*map(json.loads, texts), strict=True))
        if len(set(each[0])) > 1 or len(set(each[1])) > 1:
            self._ranks_differ(
                "the ranks' training data differ in length",
                f"has {rows} rows in {own} batches",
            )
        run.steps_in_epoch, run.updates_in_epoch, run.max_steps = map(min, each[1:4])
        run.epochs = max(each[4])
        if own > run.steps_in_epoch:
            warnings.warn(
                f"the train dataloader has {own} batches on this rank and "
                f"{run.steps_in_epoch} on another; an epoch has no more than these. "
                "even_batches in accelerator_config gives all ranks equally many",
                stacklevel=2,
            )

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
        survivors.stand_by(self)
        if self.model_init is not None:
            self._seed()
            self.model = self.model_wrapped = self.call_model_init(trial)
            self.optimizer = self.lr_scheduler = None
            self._shard_group = self._replica_group = None
        shards.check_group(self)
        if self._adapter.is_wrapped(self.model_wrapped):
            self.model_wrapped = self.model  # of the run before
        if self._sharding is None:
            self._move_model_to_device(self.model, args.device)
        if args.gradient_checkpointing:
            options = dict(args.gradient_checkpointing_kwargs or {}) or None
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=options
            )
        self._align_special_tokens()
        if self.neftune_noise_alpha is not None:
            self.model = self._activate_neftune(self.model)
        if getattr(args, "pack_sequences", False):
            collator = self.data_collator
            given = None if collator is self._own_collator else collator
            self._packing = self._adapter.packing.check_packs(self.model, given)
        if getattr(args, "chunked_cross_entropy", False):
            self._deferral = self._adapter.defer_logits(self.model)
        if "underflow_overflow" in args.debug and self._debugged is not self.model:
            integrations.detect_overflow(self.model)
            self._debugged = self.model
        folder = self._resolve_checkpoint(resume)
        if folder is not None:
            shards.load_by(self, "_load_from_checkpoint", folder)
        return folder

    def _seed(self) -> None:
        """Seed the generators, torch's too where a model of torch may be made."""
        if self.model_init is None and "torch" not in sys.modules:
            seed_loaded(self.args.seed)
        else:
            full = self.args.full_determinism
            (enable_full_determinism if full else set_seed)(self.args.seed)

    def _resolve_checkpoint(self, resume: str | bool | None) -> str | None:
        own = "" if resume is None or resume is False else str(resume)
        # A rank that has ended a run before waits here for the one that saves.
        each = self._together("resuming", own.encode)
        if len(set(map(bool, each))) > 1:
            seen = ", ".join(f"rank {r}: {e.decode()!r}" for r, e in enumerate(each))
            raise ValueError(
                "some ranks resume from a checkpoint and others do not "
                f"(resume_from_checkpoint is {seen}); give all of them one or none"
            )
        if resume is None or resume is False:
            return None
        if resume is True:
            found = checkpoint.last_checkpoint(self)
            if found is None:
                raise ValueError(
                    "No valid checkpoint found in output directory "
                    f"({self.args.output_dir}), which resume_from_checkpoint=True "
                    "needs; train without it, or name a folder"
                )
            return str(found)
        folder = os.fspath(resume)
        if not os.path.isdir(folder):
            raise ValueError(
                f"Can't find a valid checkpoint at {folder!r}: there is no such "
                "folder; give resume_from_checkpoint a checkpoint's folder, or True "
                "for the newest in output_dir"
            )
        return folder

    def set_initial_training_values(
        self, args: Any, dataloader: Any, total_train_batch_size: int | None = None
    ) -> tuple[int, int, int, float, int, int, int]:
        """Return how long the run is.

        A step in an epoch is a micro-batch.

        Args:
            args (TrainingArguments): The run's.
            dataloader: Of the training batches.
            total_train_batch_size (int | None, default None): Examples of an update, as
                releases before 5 pass them; None: get_total_train_batch_size(args).

        Returns:
            (num_train_epochs, num_update_steps_per_epoch, num_examples,
            num_train_samples, total_train_batch_size, steps_in_epoch, max_steps).

        Raises:
            ValueError: neither max_steps nor the loader's length says.
        """
        total = total_train_batch_size or self.get_total_train_batch_size(args)
        length = len(dataloader) if has_length(dataloader) else None
        if not length:
            if args.max_steps <= 0:
                raise ValueError(
                    "the training data has no length, so max_steps must say how many "
                    f"updates to make; it is {args.max_steps}"
                )
            micro = args.max_steps * args.gradient_accumulation_steps
            samples = total * args.max_steps
            steps = args.max_steps
            return sys.maxsize, steps, samples, samples, total, micro, steps
        updates = max(math.ceil(length / args.gradient_accumulation_steps), 1)
        examples = self.num_examples(dataloader)
        if args.max_steps > 0:
            epochs = math.ceil(args.max_steps / updates)
            samples = args.max_steps * total
            if getattr(args, "max_tokens_per_batch", None) is not None:
                samples = args.max_steps * examples // updates
            return epochs, updates, examples, samples, total, length, args.max_steps
        steps = math.ceil(args.num_train_epochs * updates)
        samples = self.num_examples(dataloader) * args.num_train_epochs
        epochs = math.ceil(args.num_train_epochs)
        return epochs, updates, examples, samples, total, length, steps

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the examples that an update sees: micro-batch times accumulation times
        ranks.

        Args:
            args (TrainingArguments): The run's.
        """
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
        self.state = checkpoint.new_state(self)
        self.state.is_hyper_param_search = trial is not None
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, max_steps)
        self._set_loss_state()
        self._means, self._resume_state, self._stopped = {}, {}, False
        self._evaluated = {}
        position = (0, 0)
        if resume_from_checkpoint is not None:
            checkpoint.load_trainer_state(self, resume_from_checkpoint)
            data.resume_seed(self)
            position = data.position(self, num_update_steps_per_epoch)
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        self._globalstep_last_logged = self._window_start
        self.state.resumed_from = resume_from_checkpoint or ""
        return position

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """Optimizer, schedule and the wrapped model; the checkpoint's state of them."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        zero = deepspeed.config_of(self.args)
        if zero is not None:
            zero.trainer_config_finalize(self.args, self.model, max_steps)
        shards.shard_model(self, resume_from_checkpoint)
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        shards.check_optimizer(self)
        shards.offload_state(self)
        blocks.make_blocks(self)
        model = self._wrap_model(self.model_wrapped)
        self.model_wrapped = model
        self._syncs_each_batch = accelerator.syncs_each_batch(self.args)
        memory.prepare(self, model)
        self._records_crash = bool(getattr(self.args, "crash_record", False))
        self._loss_scaler = self._make_loss_scaler()
        made = average.from_arguments(self.args, self.model)
        self.weight_average = self.weight_average if made is None else made
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
        self._choose_clipping()
        if self._shard_group is None:
            self._flos_per_token = self._adapter.flos_per_token(self.model)
        self._main_input_name = getattr(self.model, "main_input_name", "input_ids")
        set_mode("train", model, self.optimizer)  # schedule-free optimizers have one
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        checkpoint.reserve_snapshot(self)
        return model, train_dataloader

    def _choose_clipping(self) -> None:
        """Where the optimizer has parameters beside the model's, such as those of a
        loss, clip the model's alone, by their norm, as transformers does; unless the
        arguments, the groups or an override say how."""
        own = getattr(self.args, "clip_by_group", False) or any(
            "max_grad_norm" in group for group in self.optimizer.param_groups
        )
        self._clips_model_alone = (
            self._shard_group is None
            and not own
            and self._adapter.updates_others(self.model, self.optimizer)
            and not checkpoint.is_overridden(self, "_clip_grad_norm")
        )
        if self._clips_model_alone:
            self._clip_grad_norm = self._clip_model  # type: ignore[method-assign]

    def _clip_model(self, model: Any) -> float:
        """Clip the gradients of the model's parameters; return their norm before."""
        limit, p = self.args.max_grad_norm, getattr(self.args, "grad_norm_type", 2.0)
        of_model = SimpleNamespace(param_groups=[{"params": list(model.parameters())}])
        (norm,) = self._adapter.grad_norms(of_model, p, False)
        self._adapter.clip_grads(of_model, [min(1.0, limit / (norm + 1e-6))], None)
        return float(norm)

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
        setting, zero = self.args.loss_scaler, deepspeed.config_of(self.args)
        if setting is None and zero is not None:
            setting = deepspeed.loss_scaler_of(zero)
        scaler = make_loss_scaler(setting)
        return scaler if scaler.enabled else None

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save, each if the control says that it is due. Hook.

        tr_loss is the sum of the window's losses, for overrides a tensor; the trainer
        keeps its own, which an override that logs adds to _total_loss_scalar.
        """
        if self.control.should_log and self.state.global_step > self._window_start:
            self._log_window(learning_rate, start_time)
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            is_best = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            self._save_atomically(model, trial)
            self._saved_step = self.state.global_step
            handler = self.callback_handler
            if not isinstance(handler, _C.CallbackHandler) or handler.listens(
                "on_save"
            ):
                self._wait_for_save()  # a callback finds the folder there
            self.control = handler.on_save(self.args, self.state, self.control)

    def _save_on_signal(self, model: Any, trial: Any) -> None:
        """The checkpoint that Ctrl-C or SIGTERM asks for, unless this step has one."""
        step = self.state.global_step
        if self._saved_step != step and step > 0:
            if self.is_world_process_zero():
                logger.warning("Asked to stop: saving a checkpoint of step %d.", step)
            self._save_atomically(model, trial)
        self._wait_for_save()
        self._stopped = self.control.should_training_stop = True

    def _finalize_training(
        self, trial: Any, num_train_samples: int, start_time: float
    ) -> TrainOutput:
        """The last block, metrics of the run, the best model, on_train_end."""
        messages.completed()
        if self._blocks is not None:
            self._blocks.finish()  # the average that is still pending
        loss = self._training_loss()
        self.store_flos()
        metrics = throughput.of_run(self, start_time, num_train_samples)
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = loss
        skipped = self._loss_state()["nonfinite_total"]
        if skipped:
            metrics["nonfinite_steps"] = skipped
        if self._spike_total:
            metrics["spike_steps"] = self._spike_total
        self._memory_tracker.stop_and_update_metrics(metrics, "train")
        self.log(metrics)
        self._together("saving the last checkpoint", self._wait_for_save)
        set_mode("eval", self.optimizer)  # a schedule-free one leaves its average
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            shards.load_by(self, "_load_best_model")
        if not self._stopped:  # a run that is stopped resumes from its last
            checkpoint.leave_best(self, trial)
        self.control = self.callback_handler.on_train_end(
            self.args, self.state, self.control
        )
        self._finish_current_push()
        return TrainOutput(self.state.global_step, loss, metrics)

    def _end_train(self, whole: bool) -> None:
        """Undo what training did to the model; finish the saves that are under way."""
        self.is_in_train = False
        data.end_readings(self)
        release()
        if whole:
            self._resume_state = checkpoint.where(self)
        if self._reader is not None:
            self._reader.close()  # and the data loader's workers, if it has any
            self._reader = None
        self._memory_tracker.cur_stage = None
        self._adapter.leave_mixed_precision(self.model)
        self._run = None
        if self._clips_model_alone:
            del self._clip_grad_norm
            self._clips_model_alone = False
        if self.neftune_hook_handle is not None:
            self._deactivate_neftune(self.model)
        if self._packing is not None:
            self._packing.end()
            self._packing = None
        if self._deferral is not None:
            self._deferral.end()
            if whole and not self._deferral.losses:  # training_step is an override
                logger.warning(
                    "chunked_cross_entropy: no loss of this run was computed in chunks"
                )
            self._deferral = None
        self._wait_for_save(release=True)

    # Noise, and special tokens: by their names in transformers 4

    def _activate_neftune(self, model: Any) -> Any:
        """Add neftune_noise_alpha's noise to the model's embeddings while it trains;
        return the model. Hook."""
        self.neftune_hook_handle = self._adapter.add_embedding_noise(
            model, self.neftune_noise_alpha
        )
        return model

    def _deactivate_neftune(self, model: Any) -> None:
        """End the noise of _activate_neftune(). Hook."""
        self.neftune_hook_handle.remove()
        self.neftune_hook_handle = None

    def _align_special_tokens(self) -> None:
        """Give the model's configurations the tokenizer's special tokens, with a
        warning where they had others. Hook."""
        integrations.align_special_tokens(self.model, self.processing_class)

    def _wrap_model(
        self, model: Any, training: bool = True, dataloader: Any = None
    ) -> Any:
        """`model` as it is run: compiled, under mixed precision, where args say so, and
        on several ranks with gradients that become their mean, unless these train
        apart."""
        if model is not self.model:
            return model
        shards.shard_model(self, None)  # unless train() has
        model = self.model
        shards.check_has_values(self, model)
        # Under DeepSpeed's stages 1 to 3 layers compute in the dtype of their weights.
        if self._sharding is None or deepspeed.config_of(self.args) is None:
            self._adapter.enter_mixed_precision(model, self.args)
        if training and self.args.torch_compile:
            model = self._adapter.compile_model(model, self.args)
        apart = self._blocks is not None or self._shard_group is not None
        apart |= bool(getattr(self.args, "auto_find_batch_size", False))
        if training and self.args.world_size > 1 and not apart:
            model = self._adapter.data_parallel(model, self.args, self._communicator)
        return model

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if self.place_model_on_device and not is_on_meta(model):
            self._adapter.move_model(model, device)

    def call_model_init(self, trial: Any = None) -> Any:
        """Return a fresh model of model_init, which takes no argument or the trial.

        Args:
            trial (default None): Of a search; else None.

        Raises:
            RuntimeError: model_init takes more, or returns None.
        """
        assert self.model_init is not None
        takes = len(inspect.signature(self.model_init).parameters)
        if takes > 1:
            raise RuntimeError(
                f"model_init must take no argument or one (the trial), not {takes}"
            )
        model = self.model_init(trial) if takes else self.model_init()
        if model is None:
            raise RuntimeError("model_init returned None; it must return a model")
        return model

    # Optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule that were not passed.

        Args:
            num_training_steps (int): Updates of the run.
        """
        self.create_optimizer()
        check_optimizer_made(self)
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make self.optimizer unless there is one, and return it.

        Weight decay applies to the parameters of get_decay_parameter_names alone.

        Args:
            model (default None): Whose parameters it updates; None: self.model.
        """
        if self.optimizer is None:
            target = self.model if model is None else model
            decay = self.get_decay_parameter_names(target)
            groups = self._adapter.optimizer_groups(
                target, decay, self.args.weight_decay
            )
            cls: Callable[..., Any]
            if self.optimizer_cls_and_kwargs is not None:
                cls, kwargs = self.optimizer_cls_and_kwargs
            else:
                cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, target)
            kwargs = dict(kwargs)
            for name in ("params", "model", "optimizer_dict"):  # an override's groups
                groups = kwargs.pop(name, groups)
            self.optimizer = cls(groups, **kwargs)
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: Any, model: Any = None
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the class that args.optim names and its keywords, without the
        parameters.

        Args:
            args (TrainingArguments): The run's.
            model (default None): For optimizers that choose modules by name, and for
                the device; None: the class of the package that args.optim is of where
                it is installed, else the one for parameters of torch on args.device.
        """
        from ctrainer.arguments.optimizers import optimizer_class

        adapter = (
            adapters.by_name("ctrainer.adapters.torch")
            if model is None
            else adapters.for_model(model)
        )
        return optimizer_class(args, model, adapter)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Return the names of the parameters that weight decay applies to.

        Args:
            model: Whose parameters.
        """
        return list(self._adapter.decay_parameter_names(model))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make self.lr_scheduler unless there is one, and return it.

        Args:
            num_training_steps (int): Updates of the run.
            optimizer (default None): Whose learning rates it sets; None:
                self.optimizer.
        """
        if self.lr_scheduler is None:
            args = self.args
            of = self.optimizer if optimizer is None else optimizer
            zero = deepspeed.config_of(args)
            if zero is not None and zero.get_value("scheduler") is not None:
                section = zero.get_value("scheduler")
                self.lr_scheduler = deepspeed_schedules.from_config(section, of)
            else:
                kind = args.lr_scheduler_type
                self.lr_scheduler = self._adapter.make_scheduler(
                    str(getattr(kind, "value", kind)),
                    of,
                    args.get_warmup_steps(num_training_steps),
                    num_training_steps,
                    dict(args.lr_scheduler_kwargs or {}),
                )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def compare_trainer_and_checkpoint_args(
        training_args: Any, trainer_state: Any
    ) -> None:
        """Warn of arguments that differ from those of a checkpoint.

        Args:
            training_args (TrainingArguments): The run's.
            trainer_state (TrainerState): The checkpoint's.
        """
        messages.differing_arguments(training_args, trainer_state)

    # Batches

    get_train_dataloader = data.get_train_dataloader
    get_eval_dataloader = data.get_eval_dataloader
    get_test_dataloader = data.get_test_dataloader
    _get_dataloader = data.get_dataloader
    _get_train_sampler = data.get_train_sampler
    _get_eval_sampler = data.get_eval_sampler
    _set_signature_columns_if_needed = data.set_signature_columns_if_needed
    _remove_unused_columns = data.remove_unused_columns
    _get_collator_with_removed_columns = data.get_collator_with_removed_columns
    _epoch_iterator = data.epoch_iterator
    _evaluation_batches = data.evaluation_batches
    get_batch_samples = data.get_batch_samples
    _get_num_items_in_batch = data.get_num_items_in_batch

    # A micro-batch

    training_step = step.training_step
    compute_loss = step.compute_loss
    floating_point_ops = step.floating_point_ops
    _prepare_inputs = step.prepare_inputs
    _scale_of = step.scale_of

    def compute_loss_context_manager(self) -> Any:
        """Return the context in which the loss is computed: that of
        autocast_smart_context_manager().

        Mixed precision does not need it: the model's own forward runs under autocast.
        """
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return a context that does nothing, for overrides to replace.

        Args:
            cache_enabled (bool, default True): Changes nothing here.
        """
        return contextlib.nullcontext()

    # Checkpoints

    save_model = shards.save_model
    _save_checkpoint = checkpoint.save_checkpoint

    def _save_atomically(self, model: Any, trial: Any = None) -> None:
        """Call _save_checkpoint(model, trial) so that all it writes appears as one
        folder.

        Returns when the snapshot is taken; _wait_for_save() waits for the disk.
        """
        checkpoint.save_atomically(
            self, trial, lambda: self._save_checkpoint(model, trial)
        )

    def _get_output_dir(self, trial: Any = None) -> str:
        """The folder that checkpoints are written to.

        While one is being made that is a temporary folder; what is put into its
        checkpoint-N becomes part of the checkpoint.
        """
        if self._staged_folder is not None:
            return os.path.dirname(self._staged_folder)
        return checkpoint.run_dir(self, trial)

    def _wait_for_save(self, release: bool = False) -> None:
        """Return when the last checkpoint is on the disk; raise OSError if it failed.

        With release, return the memory of the snapshots to the system.
        """
        writer = self._checkpoint_writer
        if writer is not None and self._staged_folder is None:
            if release:
                writer.release()
            writer.wait()

    _save = checkpoint.save
    _save_optimizer_and_scheduler = shards.save_optimizer_and_scheduler
    _save_scaler = checkpoint.save_scaler
    _save_weight_average = shards.save_weight_average
    _save_rng_state = checkpoint.save_rng_state
    save_state = checkpoint.save_state
    _sorted_checkpoints = checkpoint.sorted_checkpoints
    _rotate_checkpoints = checkpoint.rotate_checkpoints
    _determine_best_metric = best.determine_best_metric
    _load_from_checkpoint = shards.load_from_checkpoint
    _load_optimizer_and_scheduler = shards.load_optimizer_and_scheduler
    _load_scaler = checkpoint.load_scaler
    _load_weight_average = shards.load_weight_average
    _load_callback_state = checkpoint.load_callback_state
    _load_best_model = shards.load_best_model
    _load_rng_state = checkpoint.load_rng_state

    # Local steps

    _save_blocks = blocks.save_blocks
    _load_blocks = blocks.load_blocks

    # Search of hyper-parameters

    hyperparameter_search = search.hyperparameter_search
    _hp_search_setup = search.hp_search_setup
    _report_to_hp_search = search.report_to_hp_search
    _tune_save_checkpoint = search.tune_save_checkpoint
    _run_name = search.run_name

    # Evaluation

    evaluate = evaluation.evaluate
    predict = evaluation.predict
    prediction_step = evaluation.prediction_step

    def gather_function(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows that all ranks have of nested tensors, each row once, in rank
        order; what is given, where there is one rank. All ranks have to call it.

        A function that is assigned to this name takes its place in evaluation; the
        loop then does not gather what it returns.

        Args:
            input_data: Nested tensors of this rank. Shorter rows are filled with -100.
            use_gather_object (bool, default False): Changes nothing: other objects
                travel pickled anyway.
        """
        group = self._communicator
        if group.world_size == 1 or input_data is None:
            return input_data
        return _C.nested_gather(input_data, group, -100, not self._dummy_batch)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Do what gather_function does, by the name it had in older releases."""
        return TrainerRun.gather_function(self, tensors)

    evaluation_loop = evaluation.evaluation_loop
    prediction_loop = evaluation.evaluation_loop
    _evaluate = evaluation.evaluate_in_training
    num_examples = evaluation.num_examples


# Functions that C calls by name


def call_run_epoch(trainer: TrainerRun, run: _C.Run) -> None:
    """Call an override of _run_epoch() for the run's epoch."""
    epochs_trained, steps_trained = trainer._first_place
    model, loader = run.model, run.loader
    trainer._call_hook(
        "_run_epoch",
        model=run.model,
        epoch=run.epoch,
        train_dataloader=run.loader,
        steps_in_epoch=run.steps_in_epoch,
        num_update_steps_per_epoch=run.updates_in_epoch,
        trial=run.trial,
        ignore_keys_for_eval=run.ignore_keys,
        start_time=run.start_time,
        resume_from_checkpoint=trainer.state.resumed_from or None,
        epochs_trained=epochs_trained,
        steps_trained_in_current_epoch=steps_trained,
    )
    run.model, run.loader = model, loader  # an epoch may have had others


def log_save_evaluate(
    trainer: TrainerRun, run: _C.Run, learning_rate: float | None
) -> None:
    """Call the hook, with keywords for all arguments but the sum, since releases of
    transformers differ in their order."""
    loss: Any = trainer._window_loss
    if checkpoint.is_overridden(trainer, "_maybe_log_save_evaluate"):
        trainer._read_device_loss()
        device = trainer.args.device
        loss = trainer._adapter.loss_sum(trainer._window_loss, device)
    trainer._call_hook(
        "_maybe_log_save_evaluate",
        loss,
        grad_norm=trainer._last_grad_norm,
        model=run.model,
        trial=run.trial,
        epoch=run.epoch,
        ignore_keys_for_eval=run.ignore_keys,
        start_time=run.start_time,
        learning_rate=learning_rate,
    )


def different_batches(trainer: TrainerRun, n: int, without: int) -> None:
    """Raise on every rank, unless the arguments let the ranks have different numbers of
    batches for an update: here n, and none on `without` ranks, which ends the epoch."""
    step = trainer.state.global_step
    trainer._ranks_differ(
        f"the ranks have different numbers of batches for update {step + 1}",
        f"has {n}",
    )
    if n > 0 and without > 0:
        group = trainer._communicator
        warnings.warn(
            f"the epoch ends after step {step}, where {without} of {group.world_size} "
            f"ranks have no batch left; {n} batches of rank {group.rank} are not "
            "trained on. even_batches in accelerator_config gives all ranks equally "
            "many",
            stacklevel=2,
        )


def report_spike(trainer: TrainerRun, step: int, norm: float) -> None:
    """Log why update `step` of the run is skipped, with local steps on each rank."""
    if trainer.is_world_process_zero() or trainer._blocks is not None:
        known = np.array(trainer._recent_norms)
        logger.warning(
            "The update of step %d is skipped: its gradient norm is %.4g, and the mean "
            "of the last %d norms %.4g, with a standard deviation of %.2g.", step,
            norm, len(known), known.mean(), known.std(ddof=1),
        )  # fmt: skip


def no_batches(trainer: TrainerRun) -> None:
    """Stop a run whose epoch has no batch, with a warning."""
    trainer.control.should_training_stop = True
    warnings.warn(
        "the train dataloader gave no batch; training stops at step "
        f"{trainer.state.global_step}. An iterable dataset that ends cannot be read "
        "again unless its __iter__ starts anew",
        stacklevel=2,
    )
