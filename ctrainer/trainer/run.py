"""Trainer: what happens before the first batch and after the last."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ctrainer import _C
from ctrainer.arguments import accelerator
from ctrainer.arguments.loss_scaler import make_loss_scaler
from ctrainer.checkpoint import PREFIX
from ctrainer.comm import world
from ctrainer.trainer.base import TrainerBase
from ctrainer.trainer.blocks import LocalSteps
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
        self._train_mode(model)
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

    def _train_mode(self, model: Any) -> None:
        """Put model and optimizer (schedule-free ones have modes) into train mode."""
        for part in (model, self.optimizer):
            if callable(getattr(part, "train", None)):
                part.train()

    def _start_clock(self) -> float:
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        return time.time()

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

    # Optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule that were not passed."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make self.optimizer unless there is one, and return it.

        Weight decay applies to the parameters of get_decay_parameter_names alone.
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
        """The class that args.optim names and its keywords, without the parameters."""
        from ctrainer.arguments.optimizers import optimizer_class

        return optimizer_class(args, model)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        return list(self._adapter.decay_parameter_names(model))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make self.lr_scheduler unless there is one, and return it."""
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
        """Return the loader of evaluation batches of `eval_dataset`: a data set, a key
        of self.eval_dataset, or None for self.eval_dataset."""
        return self._train_data.get_eval_dataloader(self, eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of batches to predict."""
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

    def _epoch_iterator(
        self, loader: Any, epoch: int, skip: int, checkpoint: str | None
    ) -> Any:
        """Batches of the epoch from number `skip` on.

        The generators' states at the beginning of the epoch are kept for checkpoints:
        a run resumed in its middle starts the epoch with them, so that its order is
        the same, and then takes those of the moment of saving. One resumed between two
        epochs starts with those.
        """
        return self._train_data.epoch_iterator(self, loader, epoch, skip, checkpoint)

    def _evaluation_batches(self, loader: Any) -> Any:
        """An evaluation's batches, which draw alike each time, by their place: what
        they draw changes neither the training that follows nor what a resumed run
        finds."""
        return self._train_data.evaluation_batches(self, loader)

    # Checkpoints

    def _save(
        self,
        output_dir: str | None = None,
        state_dict: dict[str, Any] | None = None,
    ) -> None:
        """Save weights, configuration, processing class and arguments. Hook."""
        self._checkpoint_files.save(self, output_dir, state_dict)

    def _share_weights(self, folder: str, in_checkpoint: bool) -> Any:
        """What of the weights is to be written into the folder, where they are not the
        model's own; called by all ranks."""
        return self._checkpoint_files.share_weights(self, folder, in_checkpoint)

    def _save_shared(self, folder: str, weights: dict[str, Any]) -> Any:
        """Save what _share_weights gave."""
        return self._checkpoint_files.save_shared(self, folder, weights)

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

    def _save_trainer_state(self, output_dir: str) -> None:
        """Save trainer_state.json, and in a file of ours what it has no place for."""
        self._checkpoint_files.save_trainer_state(self, output_dir)

    def save_state(self) -> None:
        """Save the state as trainer_state.json in args.output_dir, on rank 0."""
        self._checkpoint_files.save_state(self)

    def _push_saved_model(self) -> None:
        self._checkpoint_files.push_saved_model(self)

    def _run_dir(self, trial: Any = None) -> str:
        """Where the checkpoints of this run, or of this trial of a search, end up."""
        return self._checkpoint_files.run_dir(self, trial)

    def _note_best(self, trial: Any = None) -> None:
        """Tell the state where the best checkpoint is, or will be in a moment."""
        self._checkpoint_files.note_best(self, trial)

    def _check_save(self) -> None:
        """Give paths that an override took from the temporary folder their final form,
        before the save is committed."""
        self._checkpoint_files.check_save(self)

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

    def _take_rank_files(self) -> bytes:
        """The files that this rank hands over: a line of JSON with their sizes in
        bytes by their names, then one after the other."""
        return self._checkpoint_files.take_rank_files(self)

    def _add_rank_files(self, parcels: list[bytes]) -> None:
        """Put the files of all ranks into the open save."""
        self._checkpoint_files.add_rank_files(self, parcels)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set all generators as they were when the checkpoint was saved. Hook."""
        self._checkpoint_files.load_rng_state(self, checkpoint)

    # Local steps

    def _save_blocks(self, output_dir: str) -> None:
        """Save blocks.pt: how many updates the block has, the model that it began with
        and the momentum, if ranks train apart; of every rank but the first, whose own
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
        trial, train along and return None. Raises RuntimeError without model_init,
        ImportError without transformers or the backend.
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
        """Tell the search how an evaluation went; it may prune the trial."""
        self._hp_search.report_to_hp_search(self, trial, step, metrics)
