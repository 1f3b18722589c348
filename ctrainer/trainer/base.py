"""Trainer: the attributes of an instance, as its parts and subclasses see them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ctrainer import _C
from ctrainer.average import WeightAverage
from ctrainer.callbacks import CallbackHandler
from ctrainer.memory_tracker import TrainerMemoryTracker
from ctrainer.trainer_state import TrainerControl, TrainerState


class TrainerBase(_C.Trainer):
    """Declares what __init__ sets; names and meaning are transformers'."""

    args: Any
    model: Any
    model_wrapped: Any
    model_init: Callable[..., Any] | None
    data_collator: Callable[..., Any]
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    compute_loss_func: Any
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None
    neftune_noise_alpha: float | None
    label_smoother: Any
    label_names: list[str]
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    callback_handler: CallbackHandler
    control: TrainerControl
    state: TrainerState
    is_in_train: bool
    is_model_parallel: bool
    _memory_tracker: TrainerMemoryTracker
    place_model_on_device: bool
    hub_model_id: str | None
    current_flos: float
    current_gradient_accumulation_steps: int

    # Our own, read by C under these names
    _adapter: ModuleType  # ctrainer.adapters.torch or .numpy
    _inputs_stay: bool  # batches are used where the loader put them
    _loss_shifts_labels: bool
    _signature_columns: list[str] | None
    _eval_dataloaders: dict[str, Any]
    _train_batch_size: int
    _created_lr_scheduler: bool
    _schedule_on_metric: bool
    _stray_parameters: bool
    _flos_per_token: float
    _main_input_name: str
    _counts_tokens: bool
    _counted_tokens: float  # of this rank, not yet in the state
    _initial_num_input_tokens_seen: int
    _globalstep_last_logged: int
    _handles_signals: bool
    _syncs_each_batch: bool  # gradients become averages after every micro-batch
    _loss_scaler: _C.LossScaler | None
    weight_average: WeightAverage | None
    _neftune: Any
    _epoch: int
    _saved_step: int
    _rank_files: dict[str, bytes]  # of this rank, for the ranks that write
    _resume_state: dict[str, Any]
    _reader: Any = None  # of the training data, while train() runs

    def is_local_process_zero(self) -> bool:
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        return bool(self.args.process_index == 0)
