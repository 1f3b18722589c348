"""Trainer: the attributes of an instance, as its parts and subclasses see them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ctrainer import _C, average
from ctrainer.average import WeightAverage
from ctrainer.callbacks import CallbackHandler
from ctrainer.memory_tracker import TrainerMemoryTracker
from ctrainer.trainer_state import TrainerControl, TrainerState
from ctrainer.trainer_utils import speed_metrics

if TYPE_CHECKING:
    from ctrainer.arguments.fsdp import Sharding
    from ctrainer.bmuf import BMUF


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
    is_fsdp_enabled: bool
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
    _resumes_ranks = False  # does the run resume with the ranks that it was saved by?
    _blocks: BMUF | None  # local steps, between synchronizations
    _sharding: Sharding | None
    _shard_group: _C.Communicator | None  # of ranks that have a shard each
    _trial: Any

    # Search of hyper-parameters
    hp_search_backend: Any
    hp_space: Callable[..., dict[str, Any]]
    hp_name: Callable[..., str] | None
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any

    def is_local_process_zero(self) -> bool:
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        return bool(self.args.process_index == 0)

    # What the loop asks of the framework

    def _make_weight_average(self) -> None:
        """Make self.weight_average anew if the arguments ask for one."""
        made = average.from_arguments(self.args, self.model)
        if made is not None:
            self.weight_average = made

    @property
    def _weight_average(self) -> Any:
        """What the loop drives."""
        return None if self.weight_average is None else self.weight_average.core

    def _averaged_weights(self) -> Any:
        """A context in which the model has the averaged weights, or None: what
        evaluation and prediction run in."""
        chosen = self.weight_average
        if chosen is None or not getattr(self.args, "average_in_eval", True):
            return None
        return chosen.applied() if chosen.core.n_averaged > 0 else None

    def _prepare_input(self, data: Any) -> Any:
        """`data` with its tensors on the device; overrides see every batch here that
        is no plain dict, or goes to a GPU."""
        return self._adapter.prepare_input(data, self.args.device)

    def _item_count(self, n: int, device: Any) -> Any:
        return self._adapter.item_count(n, device, bool(self.args.torch_compile))

    def _count_targets(self, labels: Any, shifted: bool) -> int | None:
        return self._adapter.count_targets(labels, shifted)  # type: ignore[no-any-return]

    def _no_loss(self, loss: Any) -> Any:
        return self._adapter.no_loss(loss)

    def _add_device_loss(self, total: Any, loss: Any) -> Any:
        return self._adapter.add_device_loss(total, loss)

    def _read_device_loss(self, total: Any) -> tuple[float, int]:
        steps = self.args.gradient_accumulation_steps
        return self._adapter.read_device_loss(total, steps)  # type: ignore[no-any-return]

    def _device_grad_norms(
        self, optimizer: Any, norm_type: float, by_group: bool
    ) -> list[float]:
        return self._adapter.grad_norms(  # type: ignore[no-any-return]
            optimizer, norm_type, by_group
        )

    def _device_layer_norms(self, optimizer: Any, norm_type: float) -> list[float]:
        return self._adapter.layer_norms(  # type: ignore[no-any-return]
            optimizer, norm_type
        )

    def _parameter_labels(self) -> dict[Any, str]:
        """What log_layer_grad_norms calls each parameter."""
        depth = self.args.layer_grad_norm_depth
        return self._adapter.parameter_labels(  # type: ignore[no-any-return]
            self.model, depth
        )

    def _device_grad_clip(
        self, optimizer: Any, factors: list[float], limit: float | None
    ) -> None:
        self._adapter.clip_grads(optimizer, factors, limit)

    def _smoothed_loss(self, model: Any, outputs: Any, labels: Any, count: Any) -> Any:
        shift = self._loss_shifts_labels
        return self.label_smoother(outputs, labels, shift, num_items_in_batch=count)

    # Tokens

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count a micro-batch's tokens, with or without padding, where it maps names to
        tensors. Of several ranks they come into the state together, before a log or a
        checkpoint."""
        name = self._main_input_name
        if not hasattr(inputs, "keys") or name not in inputs:
            return
        tokens = inputs[name]
        count = int(tokens.numel() if hasattr(tokens, "numel") else np.size(tokens))
        if self.args.include_num_input_tokens_seen == "non_padding":
            pad = getattr(self.processing_class, "pad_token_id", None)
            if "attention_mask" in inputs:
                count = int(inputs["attention_mask"].sum())
            elif pad is not None:
                count = int((tokens != pad).sum())
        if self.args.world_size == 1:
            self.state.num_input_tokens_seen += count
        else:
            self._counted_tokens += count

    def _log_tokens(self, logs: dict[str, Any], start: float | None) -> None:
        logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        if start is not None:
            seen = (
                self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
            )
            logs.update(speed_metrics("train", start, num_tokens=seen))
