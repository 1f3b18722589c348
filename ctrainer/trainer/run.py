"""Trainer: what happens before the first batch and after the last."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from ctrainer import _C, adapters
from ctrainer.arguments import accelerator
from ctrainer.arguments.loss_scaler import make_loss_scaler
from ctrainer.checkpoint import PREFIX
from ctrainer.comm import world
from ctrainer.trainer import evaluation
from ctrainer.trainer.base import TrainerBase
from ctrainer.trainer.blocks import LocalSteps
from ctrainer.trainer.checkpoint import call_if_there
from ctrainer.trainer.data import TrainData
from ctrainer.trainer.search import Search
from ctrainer.trainer.shards import ShardedFiles, is_on_meta
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


class TrainerRun(TrainerBase):
    """Preparation and end of train(), whose loop is C, and transformers' hooks.

    What subclasses may override is a method here and is called on the instance, by the
    components too. These hold no state of their own: it is the trainer's.
    """

    _checkpoint_files = ShardedFiles()
    _local_steps = LocalSteps()
    _hp_search = Search()
    _train_data = TrainData()

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
        """
        if "model_path" in kwargs:  # of transformers 4
            resume_from_checkpoint = kwargs.pop("model_path")
        if kwargs:
            raise TypeError(f"train() got unexpected arguments: {', '.join(kwargs)}")
        try:
            folder = self._begin_train(resume_from_checkpoint, trial)
            output, number = self._call_loop(folder, trial, ignore_keys_for_eval)
        except BaseException:
            with contextlib.suppress(BaseException):
                self._leave_run()
            raise
        self._end_train(True)
        if number:
            _end_by_signal(number)
        return output

    def _leave_run(self) -> None:
        """After a failure: close the group, so that no rank waits for this one."""
        try:
            self._leave_ranks()
        except RuntimeError as error:  # a collective is under way
            logger.warning("the group of the run stays open: %s", error)
        self._end_train(False)

    def _prepare_run(self, run: _C.Run) -> None:
        """Fill in the run: its length, its place and the model, all of it ready."""
        run.loader = self.get_train_dataloader()
        values = self.set_initial_training_values(run.args, run.loader)
        if not isinstance(values, tuple) or len(values) != 7:
            raise TypeError(
                "set_initial_training_values must return a tuple of 7 values, got "
                f"{values!r}"
            )
        run.epochs, run.updates_in_epoch, rows, samples, _, steps, run.max_steps = (
            values
        )
        run.samples, run.steps_in_epoch = int(samples), steps
        if self._communicator.world_size > 1:
            self._agree_on_length(run, rows)
        run.epoch, run.micro_step = self._init_training_state(
            run.max_steps, run.updates_in_epoch, run.epochs, run.checkpoint, run.trial
        )
        run.model, run.loader = self._prepare_for_training(
            run.max_steps, run.loader, run.checkpoint
        )
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        run.start_time = time.time()

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

    def _finish_run(self, run: _C.Run) -> TrainOutput:
        """What the run returns, once its last epoch has ended."""
        return self._finalize_training(run.trial, run.samples, run.start_time)

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
            found = self._checkpoint_files.last_checkpoint(self)
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
        """Return how long the run is.

        A step in an epoch is a micro-batch.

        Args:
            args (TrainingArguments): The run's.
            dataloader: Of the training batches.

        Returns:
            (num_train_epochs, num_update_steps_per_epoch, num_examples,
            num_train_samples, total_train_batch_size, steps_in_epoch, max_steps).

        Raises:
            ValueError: neither max_steps nor the loader's length says.
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
            self._checkpoint_files.load_trainer_state(self, resume_from_checkpoint)
            position = self._train_data.position(self, num_update_steps_per_epoch)
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        self._globalstep_last_logged = self.state.global_step
        return position

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """Optimizer, schedule and the wrapped model; the checkpoint's state of them."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._checkpoint_files.shard_model(self, resume_from_checkpoint)
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self._checkpoint_files.check_optimizer(self)
        self._local_steps.make_blocks(self)
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
        for part in (model, self.optimizer):  # schedule-free optimizers have modes
            call_if_there(part, "train")
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._checkpoint_files.reserve_snapshot(self)
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

        tr_loss is the sum of the window's losses, for overrides to read; the trainer
        keeps its own.
        """
        if self.control.should_log and self.state.global_step > self._window_start:
            self._log_window(learning_rate, start_time)
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            best = self._determine_best_metric(metrics, trial)
            if self.args.save_strategy == "best":
                self.control.should_save = best
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
            logger.warning("Asked to stop: saving a checkpoint of step %d first.", step)
            self._save_atomically(model, trial)
        self._wait_for_save()
        self.control.should_training_stop = True

    def _finalize_training(
        self, trial: Any, num_train_samples: int, start_time: float
    ) -> TrainOutput:
        """The last block, metrics of the run, the best model, on_train_end."""
        self._local_steps.end_blocks(self)
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
        call_if_there(self.optimizer, "eval")  # a schedule-free one leaves its average
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
            self._resume_state = self._checkpoint_files.where(self)
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
        self._checkpoint_files.check_has_values(self, model)
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
            model (default None): For optimizers that choose modules by name.
        """
        from ctrainer.arguments.optimizers import optimizer_class

        return optimizer_class(args, model, adapters.for_model(model))

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
            self.lr_scheduler = self._adapter.make_scheduler(
                str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
                self.optimizer if optimizer is None else optimizer,
                args.get_warmup_steps(num_training_steps),
                num_training_steps,
                dict(args.lr_scheduler_kwargs or {}),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # Batches

    def get_train_dataloader(self) -> Any:
        """Return the loader of training batches.

        Raises ValueError without a train_dataset.
        """
        return self._train_data.get_train_dataloader(self)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of evaluation batches.

        Args:
            eval_dataset (default None): A data set, a key of self.eval_dataset, or None
                for self.eval_dataset.
        """
        return self._train_data.get_eval_dataloader(self, eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of batches to predict.

        Args:
            test_dataset: The data set.
        """
        return self._train_data.get_test_dataloader(self, test_dataset)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        return self._train_data.get_dataloader(
            self,
            dataset,
            description,
            batch_size,
            sampler_fn,
            is_training,
            dataloader_key,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self._train_data.get_train_sampler(self, train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return self._train_data.get_eval_sampler(self, eval_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        """Fill _signature_columns: the names that the model's forward takes, and those
        of the labels."""
        self._train_data.set_signature_columns_if_needed(self)

    def _remove_unused_columns(
        self, dataset: Any, description: str | None = None
    ) -> Any:
        """`dataset` without the columns that the model's forward does not take."""
        return self._train_data.remove_unused_columns(self, dataset, description)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[..., Any], description: str | None = None
    ) -> Callable[..., Any]:
        """A collator that first drops the columns that the model does not take."""
        return self._train_data.get_collator_with_removed_columns(
            self, data_collator, description
        )

    def _epoch_iterator(self, run: _C.Run) -> Any:
        """Batches of the run's epoch from its micro-batch on.

        The generators' states at the beginning of the epoch are kept for checkpoints:
        a run resumed in its middle starts the epoch with them, so that its order is
        the same, and then takes those of the moment of saving. One resumed between two
        epochs starts with those.
        """
        return self._train_data.epoch_iterator(
            self, run.loader, run.epoch, run.micro_step, run.checkpoint
        )

    def _evaluation_batches(self, loader: Any) -> Any:
        """An evaluation's batches, which draw alike each time, by their place: what
        they draw changes neither the training that follows nor what a resumed run
        finds."""
        return self._train_data.evaluation_batches(self, loader)

    # Checkpoints

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Save the model, and the processing class, for from_pretrained() to load.
        Hook.

        Args:
            output_dir (str | None, default None): The folder; None: args.output_dir.
            _internal_call (bool, default False): The trainer calls it, and not a user:
                nothing is pushed to the Hub.
        """
        folder = self.args.output_dir if output_dir is None else output_dir
        self._checkpoint_files.save_model(self, folder, _internal_call)

    def _save_checkpoint(
        self, model: Any, trial: Any = None, metrics: Any = None
    ) -> None:
        """Save the model, optimizer, schedule, generators and state as checkpoint-N.

        Hook; called inside a save that makes the folder appear whole. An override may
        call super() and add files to _get_output_dir(trial)/checkpoint-N. Called by the
        user, it returns when the folder is in place.
        """
        files = self._checkpoint_files
        if self._staged_folder is not None:
            files.write(self, trial)
            return
        files.save_atomically(self, trial, lambda: files.write(self, trial))
        self._wait_for_save()

    def _save_atomically(self, model: Any, trial: Any = None) -> None:
        """Call _save_checkpoint(model, trial) so that all it writes appears as one
        folder.

        Returns when the snapshot is taken; _wait_for_save() waits for the disk.
        """
        if self._staged_folder is not None:
            self._save_checkpoint(model, trial)
            return
        self._checkpoint_files.save_atomically(
            self, trial, lambda: self._save_checkpoint(model, trial)
        )

    def _get_output_dir(self, trial: Any = None) -> str:
        """The folder that checkpoints are written to.

        While one is being made that is a temporary folder; what is put into its
        checkpoint-N becomes part of the checkpoint.
        """
        if self._staged_folder is not None:
            return os.path.dirname(self._staged_folder)
        return self._checkpoint_files.run_dir(self, trial)

    def _wait_for_save(self, release: bool = False) -> None:
        """Return when the last checkpoint is on the disk; raise OSError if it failed.

        With release, return the memory of the snapshots to the system.
        """
        writer = self._checkpoint_writer
        if writer is not None and self._staged_folder is None:
            if release:
                writer.release()
            writer.wait()

    def _save(
        self,
        output_dir: str | None = None,
        state_dict: dict[str, Any] | None = None,
    ) -> None:
        """Save weights, configuration, processing class and arguments. Hook."""
        self._checkpoint_files.save(self, output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save optimizer.pt and scheduler.pt. Hook."""
        self._checkpoint_files.save_optimizer_and_scheduler(self, output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        """Save scaler.pt, the state of the loss scale, if there is one. Hook."""
        self._checkpoint_files.save_scaler(self, output_dir)

    def _save_weight_average(self, output_dir: str) -> None:
        """Save weight_average.pt, the averaged weights, if there are any. Hook."""
        self._checkpoint_files.save_weight_average(self, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save rng_state.pth, the states of all generators; of several ranks each its
        rng_state_RANK.pth. Hook."""
        self._checkpoint_files.save_rng_state(self, output_dir)

    def save_state(self) -> None:
        """Save the state as trainer_state.json in args.output_dir, on rank 0."""
        self._checkpoint_files.save_state(self)

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = PREFIX,
        use_mtime: bool = False,
    ) -> list[str]:
        """Checkpoints by rising step, those that rotation must keep at the end.

        use_mtime is for callers of transformers 4 and changes nothing: a file written
        into an old folder must not make it the newest.
        """
        return self._checkpoint_files.sorted_checkpoints(
            self, output_dir, checkpoint_prefix, use_mtime
        )

    def _rotate_checkpoints(
        self, use_mtime: bool = False, output_dir: str | None = None
    ) -> None:
        """Remove the oldest checkpoints, by step, beyond args.save_total_limit, never
        the best or the last; while one is being made, as soon as that is in place."""
        self._checkpoint_files.rotate_checkpoints(self, use_mtime, output_dir)

    def _determine_best_metric(
        self, metrics: dict[str, float], trial: Any = None
    ) -> bool:
        """Is this evaluation the best so far? Notes it in the state if so. Hook.

        Raises KeyError when metric_for_best_model is not among the metrics.
        """
        return self._checkpoint_files.determine_best_metric(self, metrics, trial)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        """Load a checkpoint's weights into the model. Hook."""
        self._checkpoint_files.load_from_checkpoint(self, resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer.pt and scheduler.pt, if both are there. Hook."""
        self._checkpoint_files.load_optimizer_and_scheduler(self, checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load scaler.pt, the state of the loss scale, if there is one. Hook."""
        self._checkpoint_files.load_scaler(self, checkpoint)

    def _load_weight_average(self, checkpoint: str | None) -> None:
        """Load weight_average.pt; without it the average starts from the weights.
        Hook."""
        self._checkpoint_files.load_weight_average(self, checkpoint)

    def _load_callback_state(self) -> None:
        """Give callbacks that export a state what they had; with
        args.restore_callback_states_from_checkpoint their arguments too."""
        self._checkpoint_files.load_callback_state(self)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint. Hook."""
        self._checkpoint_files.load_best_model(self)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set all generators as they were when the checkpoint was saved. Hook."""
        self._checkpoint_files.load_rng_state(self, checkpoint)

    # Local steps

    def _save_blocks(self, output_dir: str) -> None:
        """Save blocks.pt: how many updates the block has, the model that it began with
        and the momentum, with local steps; of every rank but the first, whose own
        are the checkpoint's, blocks_RANK.pt: its weights, its optimizer. Hook."""
        self._local_steps.save_blocks(self, output_dir)

    def _load_blocks(self, checkpoint: str | None) -> None:
        """Load blocks.pt, without which a block begins with the weights, and what is
        this rank's own. Hook."""
        self._local_steps.load_blocks(self, checkpoint)

    # Search of hyper-parameters

    def hyperparameter_search(
        self,
        hp_space: Callable[..., dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[..., str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the best of n_trials trainings, each with a fresh model of model_init.

        The search is optuna's, ray's or wandb's, driven by transformers' backend of
        that name. On several ranks the first one asks it; the others receive each
        trial, train along and return None.

        Args:
            hp_space (Callable[..., dict[str, Any]] | None, default None): (trial) ->
                values by the arguments' names; None: the backend's own space.
            compute_objective (Callable[[dict[str, float]], Any] | None, default None):
                (metrics) -> what is optimized; None: the loss, or else the sum of the
                metrics.
            n_trials (int, default 20): Trainings.
            direction (str | list[str], default 'minimize'): "minimize" or "maximize"; a
                list of them for several objectives.
            backend (default None): Its name; None: the first that is installed.
            hp_name (Callable[..., str] | None, default None): (trial) -> name of a
                trial's run.
            **kwargs: Of the backend.

        Raises:
            RuntimeError: there is no model_init.
            ImportError: transformers or the backend is missing.
        """
        return self._hp_search.hyperparameter_search(
            self,
            hp_space,
            compute_objective,
            n_trials,
            direction,
            backend,
            hp_name,
            **kwargs,
        )

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the trial's values in args, each as the type that it had."""
        self._hp_search.hp_search_setup(self, trial)

    def _report_to_hp_search(
        self, trial: Any, step: int, metrics: dict[str, float]
    ) -> None:
        """Report an evaluation to the search; it may prune the trial."""
        self._hp_search.report_to_hp_search(self, trial, step, metrics)

    # Evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate, log and return the metrics: the loss, what compute_metrics
        computes, and the speed.

        Args:
            eval_dataset (Dataset | dict | str | None, default None): A data set; a dict
                of several, whose metrics begin with "<prefix>_<name>_"; the name of one
                in the trainer's dict; None for the trainer's own.
            ignore_keys (list[str] | None, default None): Outputs of the model that are
                no predictions; None takes model.config.keys_to_ignore_at_inference.
            metric_key_prefix (str, default 'eval'): Begins the name of every metric.

        Returns:
            dict[str, float]: Numbers by name.

        Raises:
            ValueError: there is no data set, or no batch.
        """
        return evaluation.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> Any:
        """Predict a data set. Without labels the metrics are the speed alone.

        Args:
            test_dataset (Dataset): The data set.
            ignore_keys (list[str] | None, default None): Outputs of the model that are
                no predictions; None takes model.config.keys_to_ignore_at_inference.
            metric_key_prefix (str, default 'test'): Begins the name of every metric.

        Returns:
            PredictionOutput: predictions, label_ids (None without labels) and metrics.

        Raises:
            ValueError: there is no batch.
        """
        return evaluation.predict(self, test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Run one batch without gradients; return (loss, predictions, labels),
        detached.

        A batch with labels goes through compute_loss, so that an override is evaluated
        as in training; another one through the model alone, and has no loss.

        Args:
            model (torch.nn.Module): The model, in its wrapper where it has one.
            inputs (dict): A batch.
            prediction_loss_only (bool): Return None for predictions and labels.
            ignore_keys (list[str] | None, default None): Outputs of the model that are
                no predictions; None takes model.config.keys_to_ignore_at_inference.
        """
        return evaluation.prediction_step(
            self, model, inputs, prediction_loss_only, ignore_keys
        )

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

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run prediction_step on every batch.

        Predictions and labels become arrays as the batches come, in no more memory than
        the result takes; rows that are shorter in the second dimension are filled with
        -100. <prefix>_loss is the mean over rows of the batch's loss.

        Args:
            dataloader (Iterable): The batches.
            description (str): Of the run, for the log and for errors.
            prediction_loss_only (bool | None, default None): Keep nothing but the loss;
                None takes args.prediction_loss_only.
            ignore_keys (list[str] | None, default None): Outputs of the model that are
                no predictions; None takes model.config.keys_to_ignore_at_inference.
            metric_key_prefix (str, default 'eval'): Begins the name of every metric.

        Returns:
            EvalLoopOutput: predictions, label_ids, metrics and num_samples.

        Raises:
            ValueError: there is no batch.
        """
        return evaluation.evaluation_loop(
            self, dataloader, description, prediction_loss_only, ignore_keys,
            metric_key_prefix,
        )  # fmt: skip

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Do what evaluation_loop does, by the name of older releases.

        Args:
            dataloader (Iterable): The batches.
            description (str): Of the run, for the log and for errors.
            prediction_loss_only (bool | None, default None): Keep nothing but the loss.
            ignore_keys (list[str] | None, default None): Outputs of the model that are
                no predictions.
            metric_key_prefix (str, default 'eval'): Begins the name of every metric.

        Returns:
            EvalLoopOutput: predictions, label_ids, metrics and num_samples.
        """
        return evaluation.evaluation_loop(
            self, dataloader, description, prediction_loss_only, ignore_keys,
            metric_key_prefix,
        )  # fmt: skip

    def _evaluate(
        self,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        skip_scheduler: bool = False,
    ) -> dict[str, float]:
        """Evaluate within a training: report to a search, and step a learning rate that
        depends on a metric. Return the metrics."""
        return evaluation.evaluate_in_training(
            self, trial, ignore_keys_for_eval, skip_scheduler
        )

    def num_examples(self, dataloader: Any) -> int:
        """Return the length of the loader's data set; without a length, batches times
        per_device_train_batch_size.

        Args:
            dataloader (Iterable): A loader of batches.

        Raises:
            TypeError: the loader has no length.
        """
        return evaluation.num_examples(self, dataloader)


def _end_by_signal(number: int) -> None:
    """End as without a handler of ours: what was installed before decides."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(number)
    raise SystemExit(str(128 + number))


# model_path= of transformers 4 is taken and not shown.
_shown = inspect.signature(TrainerRun.train)
TrainerRun.train.__signature__ = _shown.replace(  # type: ignore[attr-defined]
    parameters=[p for p in _shown.parameters.values() if p.name != "kwargs"]
)
