"""HuggingFace's Trainer on ctrainer's engine."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from ctrainer import adapters, integrations, introspect, trainer_utils
from ctrainer.arguments.settings import reject_keywords
from ctrainer.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    is_display,
    like_transformers,
    listed,
)
from ctrainer.display.progress import ProgressCallback
from ctrainer.memory_tracker import TrainerMemoryTracker
from ctrainer.runtime import messages
from ctrainer.trainer import checkpoint, hub, shards
from ctrainer.trainer.checkpoint import is_overridden
from ctrainer.trainer.run import TrainerRun
from ctrainer.trainer_state import TrainerControl
from ctrainer.trainer_utils import has_length
from ctrainer.training_args import TrainingArguments, adopt, set_log_level

logger = logging.getLogger("ctrainer.trainer")

TRAINING_ARGS_NAME = "training_args.bin"
TRAINER_STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"

DEFAULT_CALLBACKS: list[type] = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK: type = ProgressCallback


class Trainer(TrainerRun):
    """Trains and evaluates a model; a drop-in for transformers.Trainer.

    Args:
        model (torch.nn.Module, default None): Or an object of ctrainer.adapters.numpy's
            protocol. Its call takes a batch as keywords and returns the loss as
            ["loss"] or [0].
        args (TrainingArguments, default None): ctrainer's or transformers'; None: those
            of the folder "tmp_trainer".
        data_collator (Callable[..., Any] | None, default None): Makes a batch of a list
            of examples.
        train_dataset (Dataset | None, default None): Map-style or iterable.
        eval_dataset (Dataset | dict | None, default None): Map-style or iterable, or a
            dict of several.
        processing_class (default None): Tokenizer or processor, saved with the model.
        model_init (Callable[..., Any] | None, default None): Makes a fresh model for
            each train(); instead of `model`.
        compute_loss_func (Callable[..., Any] | None, default None): (outputs, labels,
            num_items_in_batch=None) -> loss.
        compute_metrics (Callable[..., dict[str, Any]] | None, default None):
            (EvalPrediction) -> dict of metrics.
        callbacks (list[Any] | None, default None): TrainerCallback instances or
            classes, beside the default ones.
        optimizers (tuple[Any, Any], default (None, None)): (optimizer, lr_scheduler);
            None makes that of args.
        optimizer_cls_and_kwargs (tuple[type, dict[str, Any]] | None, default None):
            Class and keywords of the optimizer, instead.
        preprocess_logits_for_metrics (Callable[..., Any] | None, default None):
            (logits, labels) -> what evaluation keeps.
        **kwargs: `tokenizer`, an older name of processing_class.

    Args of hooks:
        model (torch.nn.Module): The model, in its wrapper where it has one.
        inputs (dict): A batch.
        num_items_in_batch (Tensor | int | None): Targets of the update, on all ranks.
        epoch_iterator (Iterator): The batches of an epoch.
        num_batches (int): Micro-batches of an update.
        device (torch.device): Where the count of targets is put.
        trial: Of a hyperparameter search; else None.
        ignore_keys, ignore_keys_for_eval (list[str] | None): Outputs of the model that
            are dropped.
        prediction_loss_only (bool): Compute the loss alone.
        input_data: Nested tensors of this rank.
        cache_enabled (bool): Of autocast.

    Raises:
        ValueError: arguments contradict each other or are not supported; the message
            names them.
        RuntimeError: neither model nor model_init, or both.
        TypeError: another keyword.

    Source: transformers 5.17, trainer.py; differences: docs/start/from_transformers.md.

    Example:
        >>> import torch
        >>> from ctrainer import ProgressCallback, Trainer, TrainingArguments
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x, labels):
        ...         return {"loss": ((super().forward(x) - labels) ** 2).mean()}
        >>> rows = [{"x": torch.ones(3), "labels": torch.zeros(1)}] * 8
        >>> args = TrainingArguments(max_steps=2, use_cpu=True, disable_tqdm=False)
        >>> trainer = Trainer(Model(3, 1), args, train_dataset=rows)
        >>> trainer.remove_callback(ProgressCallback)
        >>> trainer.train().global_step
        2
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if "tokenizer" in kwargs:  # its name before transformers 4.46
            processing_class = kwargs.pop("tokenizer")
        reject_keywords("Trainer", Trainer, kwargs)
        self.args = adopt(
            TrainingArguments(output_dir="tmp_trainer") if args is None else args
        )
        set_log_level(self.args)
        self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.start("init")
        self.model_init = model_init
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.processing_class = processing_class
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._seed()
        self._take_model(model)
        if self._is_of_transformers() or is_overridden(
            self, "create_accelerator_and_postprocess"
        ):
            self.create_accelerator_and_postprocess()
        self.data_collator = data_collator or self._default_collator()
        self._own_collator = None if data_collator else self.data_collator
        self._validate_args()
        self._start_state(listed(callbacks))
        self._memory_tracker.stop_and_update_metrics(stage="init")

    def _take_model(self, model: Any) -> None:
        """Check, inspect and place the model, or the first one of model_init."""
        if (model is None) == (self.model_init is None):
            raise RuntimeError(
                "the trainer needs either model or model_init"
                + (", not both" if model is not None else "")
            )
        model = self.call_model_init() if model is None else model
        self._adapter = adapters.for_model(model)
        self._adapter.prepare_args(self.args)
        self.model = self.model_wrapped = model
        device = self.args.device
        places = set((getattr(model, "hf_device_map", None) or {}).values())
        self.is_model_parallel = len(places - {"cpu", "disk"}) > 1
        full_eval = self.args.bf16_full_eval or self.args.fp16_full_eval
        self.place_model_on_device = (
            self.args.place_model_on_device is not False and not self.is_model_parallel
        )
        self._inputs_stay = self._adapter.inputs_stay(self.args)
        if not full_eval and shards.plan_of(self.args) is None:
            self._move_model_to_device(model, device)
        self._inspect_model()

    def _inspect_model(self) -> None:
        base = introspect.base_model(self.model)
        self.model_accepts_loss_kwargs = introspect.accepts_loss_kwargs(base)
        found = introspect.label_names(type(base))
        given = self.args.label_names
        self.label_names = found if given is None else given
        self.can_return_loss = introspect.can_return_loss(type(base))
        self._main_input_name = "input_ids"
        self._loss_shifts_labels = self._adapter.shifts_labels(base)
        self.label_smoother = None
        if self.args.label_smoothing_factor == 0:
            return
        config = getattr(self.model, "config", None)
        if getattr(config, "problem_type", None) == "multi_label_classification":
            messages.no_smoothing()
            return
        self.label_smoother = introspect.LabelSmoother(self.args.label_smoothing_factor)

    def _is_of_transformers(self) -> bool:
        """Was the class written for transformers' Trainer? It has its arguments, and
        may use accelerate's state, which that one's __init__ makes."""
        own = type(self).__module__.partition(".")[0] == __package__.partition(".")[0]
        return not own and not isinstance(self.args, TrainingArguments)

    def _default_collator(self) -> Callable[..., Any]:
        """Padding by the tokenizer where there is one, else plain stacking."""
        if callable(getattr(self.processing_class, "pad", None)):
            return self._adapter.padding_collator(self.processing_class)  # type: ignore[no-any-return]
        return self._adapter.default_collator  # type: ignore[no-any-return]

    def _validate_args(self) -> None:
        """Raise for arguments that contradict each other or the data. Hook."""
        args = self.args
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise RuntimeError("pass optimizers or optimizer_cls_and_kwargs, not both")
        if self.model_init is not None and (self.optimizer or self.lr_scheduler):
            raise RuntimeError(
                "model_init makes a new model for each run, so optimizers= cannot know "
                "its parameters; override create_optimizer_and_scheduler instead"
            )
        if args.eval_strategy != "no" and self.eval_dataset is None:
            raise ValueError(
                f'eval_strategy="{args.eval_strategy}" needs an eval_dataset'
            )
        if args.max_steps > 0 and args.num_train_epochs > 0:
            messages.overridden_epochs()
        if not callable(self.data_collator):
            raise TypeError(
                f"data_collator must be callable, not {self.data_collator!r}"
            )
        data = self.train_dataset
        if data is not None and not has_length(data) and args.max_steps <= 0:
            raise ValueError(
                "train_dataset has no length, so max_steps must say how many updates "
                f"to make; it is {args.max_steps}"
            )
        if args.batch_eval_metrics and self.compute_metrics is not None:
            taken = inspect.signature(self.compute_metrics).parameters
            if "compute_result" not in taken:
                raise ValueError(
                    "batch_eval_metrics=True calls compute_metrics once a batch; it "
                    "must take compute_result, which is True for the last"
                )

    def _start_state(self, callbacks: list[Any]) -> None:
        """Callbacks, state and the attributes that subclasses expect to find."""
        args = self.args
        display = PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK
        reporters = integrations.reporting_callbacks(args.report_to, args.logging_dir)
        more = adapters.callbacks_of(args, self._adapter)
        own = map(like_transformers, DEFAULT_CALLBACKS)
        defaults: list[Any] = [*own, *reporters, *more]
        self.callback_handler = CallbackHandler(
            [*defaults, *callbacks], self.model, self.processing_class,
            self.optimizer, self.lr_scheduler,
        )  # fmt: skip
        if not any(map(is_display, self.callback_handler.callbacks)):
            self.add_callback(like_transformers(display))
        self.__dict__.update(dict.fromkeys(_NONE), **dict.fromkeys(_FALSE, False))
        if getattr(args, "push_to_hub", False):
            self.init_hf_repo()
        if args.should_save:
            os.makedirs(args.output_dir, exist_ok=True)
        self.control = TrainerControl()
        self.state = checkpoint.new_state(self)
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.current_flos, self.current_gradient_accumulation_steps = 0, 1
        shards.plan_shards(self)
        self._means = {}
        self._train_batch_size = args.train_batch_size
        self._counts_tokens = args.include_num_input_tokens_seen not in (False, "no")
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)
        config: Any = getattr(self.model, "config", None)
        if config is not None:  # may be of any kind
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                config.use_cache = getattr(args, "use_cache", False)

    def add_callback(self, callback: Any) -> None:
        """Add a callback.

        Args:
            callback: An instance, or a class to instantiate.
        """
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback; None without one.

        Args:
            callback: An instance or a class.
        """
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback.

        Args:
            callback: An instance or a class.

        Raises:
            ValueError: an instance that is not there.
        """
        self.callback_handler.remove_callback(callback)

    # What other packages ask of it beside training

    @property
    def accelerator(self) -> Any:
        """A real accelerate.Accelerator, made when it is first asked for, and at once
        in subclasses with transformers' arguments.

        Nothing of ours needs it; subclasses of transformers' Trainer do. Raises
        ImportError without accelerate.
        """
        if self._accelerator is None:
            self.create_accelerator_and_postprocess()
        return self._accelerator

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        self._accelerator = value

    def create_accelerator_and_postprocess(self) -> None:
        """Make self.accelerator: on the trainer's device, by accelerator_config and the
        ddp_ arguments, with the type of autocast, but without a loss scale or
        accumulation of its own, which are ours."""
        self.accelerator = integrations.new_accelerator(self, self._inputs_stay)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The arguments of the Accelerator: those given, the type of autocast, and the
        settings of torch's DistributedDataParallel. Hook."""
        options = self._adapter.ddp_options(self.model, self.args)
        kind = getattr(self.args, "mixed_precision", None)
        if kind is None:  # arguments of transformers 4.57
            kind = "fp16" if self.args.fp16 else "bf16" if self.args.bf16 else "no"
        return {
            # accelerate knows fp16 on GPUs only
            "mixed_precision": "no" if kind == "fp16" and self._inputs_stay else kind,
            "kwargs_handlers": [integrations.ddp_handler(options)],
            **kwargs,
        }

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of the missing and unexpected keys that torch's load_state_dict()
        returned. For overrides that load weights themselves: ours raise."""
        messages.loaded_keys(load_result)

    @property
    def tokenizer(self) -> Any:
        """processing_class, by its name before transformers 4.46."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    def get_num_trainable_parameters(self) -> int:
        """Return the number of elements of the parameters that train, on all ranks
        together."""
        sizes = (
            getattr(p, "_orig_size", p.shape)
            for p in self.model.parameters()
            if p.requires_grad
        )
        return sum(size.numel() for size in sizes)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group.

        Raises:
            ValueError: before the optimizer exists.
        """
        return [group["lr"] for group in self._optimizer_or_raise().param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Return the group that a parameter is in, None where it is in none; all
        groups' parameters without it.

        Args:
            param (default None): The parameter.

        Raises:
            ValueError: before the optimizer exists.
        """
        groups = self._optimizer_or_raise().param_groups
        if param is None:
            return [group["params"] for group in groups]
        for group in groups:
            if any(param is p for p in group["params"]):
                return group
        return None

    def _optimizer_or_raise(self) -> Any:
        if self.optimizer is None:
            raise ValueError(
                "the optimizer does not exist yet; call create_optimizer()"
            )
        return self.optimizer

    def get_tp_size(self) -> int:
        """Return 1: sequences, contexts and tensors are not divided over ranks."""
        return 1

    get_sp_size = get_cp_size = get_tp_size

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Return the tokens in the batches of a loader.

        Args:
            train_dl: The loader, of batches with "input_ids".
            max_steps (int | None, default None): Count the first batch this many times
                instead.
        """
        counts = (int(batch["input_ids"].numel()) for batch in train_dl)
        return next(counts, 0) * max_steps if max_steps is not None else sum(counts)

    metrics_format = staticmethod(trainer_utils.metrics_format)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print `metrics` as a table, on the first rank.

        Args:
            split (str): "train", "eval" and so on.
            metrics (dict[str, Any]): Numbers by name.
        """
        if self.is_world_process_zero():
            trainer_utils.print_metrics(split, metrics)

    def save_metrics(
        self, split: str, metrics: dict[str, Any], combined: bool = True
    ) -> None:
        """Write `metrics` to {split}_results.json in output_dir, on the first rank.

        Args:
            split (str): "train", "eval" and so on.
            metrics (dict[str, Any]): Numbers by name.
            combined (bool, default True): Also add them to all_results.json.
        """
        if self.is_world_process_zero():
            trainer_utils.write_metrics(self.args.output_dir, split, metrics, combined)

    create_model_card = hub.create_model_card
    push_to_hub = hub.push_to_hub
    init_hf_repo = hub.init_hf_repo
    _push_from_checkpoint = hub.push_from_checkpoint
    _finish_current_push = hub.finish_current_push


# tokenizer= and model_path= of older releases are taken and not shown, as transformers
# shows neither.
_method: Any
for _method in (Trainer.__init__, Trainer.train):
    _shown = inspect.signature(_method)
    _method.__signature__ = _shown.replace(
        parameters=[p for p in _shown.parameters.values() if p.name != "kwargs"]
    )

# The attributes of transformers' Trainer that others read before training sets them.
_NONE = "deepspeed hp_name hp_search_backend hub_model_id push_in_progress".split()
_FALSE = (
    "is_in_train is_deepspeed_enabled is_fsdp_enabled is_fsdp_xla_enabled "
    "is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled"
).split()
