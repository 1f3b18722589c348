"""Trainer: the attributes of an instance, as its parts and subclasses see them."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from types import MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ctrainer import _C, adapters, throughput
from ctrainer.average import WeightAverage
from ctrainer.callbacks import CallbackHandler, is_log_due
from ctrainer.memory_tracker import TrainerMemoryTracker
from ctrainer.trainer_state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from ctrainer.arguments.fsdp import Sharding
    from ctrainer.trainer.data import Reading


class TrainerBase(_C.Trainer):
    """Declares attributes that Trainer.__init__ sets; names and meaning are
    transformers'."""

    args: Any
    model: Any
    model_wrapped: Any
    model_init: Callable[..., Any] | None
    data_collator: Callable[..., Any]
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None
    neftune_noise_alpha: float | None
    label_smoother: Any
    label_names: list[str]
    can_return_loss: bool
    callback_handler: CallbackHandler
    control: TrainerControl
    state: TrainerState
    is_in_train: bool
    is_fsdp_enabled: bool
    _memory_tracker: TrainerMemoryTracker
    place_model_on_device: bool
    hub_model_id: str | None
    push_to_hub: Callable[..., Any]
    push_in_progress: Any
    _push_from_checkpoint: Callable[..., None]
    _finish_current_push: Callable[..., None]
    current_flos: float
    current_gradient_accumulation_steps: int
    compute_loss_func: Callable[..., Any] | None
    model_accepts_loss_kwargs: bool
    _loss_shifts_labels: bool

    # Our own, of Python alone; what C shares is declared in _C.pyi
    _signature_columns: list[str] | None = None
    _eval_dataloaders: dict[str, Any]
    _train_batch_size: int
    _created_lr_scheduler = False
    _initial_num_input_tokens_seen = 0
    _globalstep_last_logged = 0
    weight_average: WeightAverage | None = None
    neftune_hook_handle: Any = None
    _deferral: Any = None  # of the logits, while train() runs
    _packing: Any = None  # of the attention, while train() runs
    _run: _C.Run | None = None  # while train() runs
    _first_place = (0, 0)  # epoch and micro-batch that train() began with
    _stopped = False  # by Ctrl-C or SIGTERM
    _means: dict[str, tuple[Any, float]]  # of log_mean(): sums and weights
    _evaluated: dict[int, dict[str, float]]  # metrics of best checkpoints, by step
    _part_rows = 0  # at most so many of a micro-batch in memory at once; 0: all
    _split_at = 0  # global_step of the last split
    _retried_at = -1  # global_step in which a single row was tried once more
    _part_kind: str | None = None  # "mean" or "sum": what the loss of rows is
    _debugged: Any = None  # the model that debug looks at
    _rank_files: dict[str, str]  # base64 of files, for the ranks that write
    _resume_state: dict[str, Any]
    _own_collator: Any = None  # the default of data_collator
    _with_all_columns: tuple[Any, Any] = None, None  # a data set before and after
    _known_lengths: dict[int, tuple[Any, Any]]  # of a data set's rows, by its id()
    _reader: Any = None  # of the training data, while train() runs
    _readings: list[Reading]  # the loaders that are read, the innermost one last
    _resumes_ranks = False  # does the run resume with the ranks that it was saved by?
    _ranks_of_state = 0  # that a checkpoint after a failure is of; 0: those there are
    _before_shards: Any = None  # the model without values, for a failure of ranks
    _own_shards: Any = None  # trained_model.Shards, after one
    _past: Any  # what models such as XLNet want back with the next batch
    _sharding: Sharding | None = None
    _clips_model_alone = False  # while train() runs
    _trial: Any = None

    # Search of hyper-parameters
    hp_search_backend: Any
    hp_space: Callable[..., dict[str, Any]]
    hp_name: Callable[..., str] | None
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An instance with what saving and logging need, also in subclasses without a
        call of __init__, such as TRL's PPOTrainer."""
        made = super().__new__(cls)
        made.is_in_train = False
        made._resume_state, made._rank_files, made._eval_dataloaders = {}, {}, {}
        made._known_lengths = {}
        made._evaluated = {}
        made._readings = []
        return made

    @property
    def _adapter(self) -> ModuleType:
        """What the model's framework offers."""
        kept: ModuleType | None = _C.Trainer._adapter.__get__(self)
        if kept is None:
            kept = self._adapter = adapters.for_model(self.model)
        return kept

    @_adapter.setter
    def _adapter(self, adapter: ModuleType) -> None:
        _C.Trainer._adapter.__set__(self, adapter)

    @property
    def _loss_scaler(self) -> _C.LossScaler | None:
        """The scale of an fp16 run's loss, which has counted the last update."""
        if self._enqueued_scaler is not None:
            self._await_update()
        scaler: _C.LossScaler | None = _C.Trainer._loss_scaler.__get__(self)  # type: ignore[union-attr]
        return scaler

    @_loss_scaler.setter
    def _loss_scaler(self, scaler: _C.LossScaler | None) -> None:
        _C.Trainer._loss_scaler.__set__(self, scaler)  # type: ignore[union-attr]

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its machine."""
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the first process of the run."""
        return bool(self.args.process_index == 0)

    # What the loop asks of the framework

    def _averaged_weights(self) -> Any:
        """A context in which the model has the averaged weights, or None: what
        evaluation and prediction run in."""
        chosen = self.weight_average
        if chosen is None or not getattr(self.args, "average_in_eval", True):
            return None
        return chosen.applied() if chosen.core.n_averaged > 0 else None

    def _prepares_plainly(self) -> bool:
        """Is _prepare_input() ours?"""
        own = getattr(self._prepare_input, "__func__", None)
        return own is TrainerBase._prepare_input

    def _prepare_input(self, data: Any) -> Any:
        """`data` with its tensors on the device. Hook: an override sees each part of a
        batch, too."""
        if not self._prepares_plainly() and isinstance(data, Mapping):
            parts = {key: self._prepare_input(part) for key, part in data.items()}
            return type(data)(parts)  # type: ignore[call-arg]
        if not self._prepares_plainly() and isinstance(data, tuple | list):
            items = [self._prepare_input(part) for part in data]
            return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
        return self._adapter.prepare_input(data, self.args.device)

    # Work that ranks succeed or fail in together

    def _together(
        self, doing: str, function: Callable[[], bytes | None]
    ) -> list[bytes]:
        """Call function() on every rank and return what all returned, in rank order:
        bytes, b"" for None. Where one fails, all raise: it its own exception, the
        others a RuntimeError that names the rank, `doing` and the error."""
        try:
            payload = function()
            if not isinstance(payload, bytes | None):
                raise TypeError(
                    f"{doing}: expected bytes or None, got a {type(payload).__name__}"
                )
        except BaseException as error:
            with contextlib.suppress(BaseException):  # the first failure is reported
                self._report_failure(error)
            raise
        group = self._communicator
        if group.world_size == 1:
            return [payload or b""]
        try:
            parts = group.gather_bytes(b"+" + (payload or b""))
        except (RuntimeError, ValueError) as error:
            raise type(error)(f"{doing}: {error}") from error
        for rank, part in enumerate(parts):
            if part[:1] == b"-":
                text = part[1:].decode(errors="replace")
                raise RuntimeError(f"{doing}: rank {rank} failed: {text}")
        return [part[1:] for part in parts]

    def _report_failure(self, error: BaseException) -> None:
        """Send the error's text to the other ranks, so that none waits for this one.

        A message begins with one byte, + for success or - for failure.
        """
        if self._communicator.world_size > 1:
            text = ""
            with contextlib.suppress(Exception):  # an error may have no text
                text = f"{type(error).__name__}: {error}"
            self._communicator.gather_bytes(b"-" + text.encode(errors="replace"))

    # Tokens

    _track_num_input_tokens = throughput.track_tokens

    # Logs

    def log_mean(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Log the mean of a number of each micro-batch, such as an auxiliary loss or an
        accuracy, beside the loss: over the micro-batches since the last log, of all
        ranks.

        For compute_loss and training_step; outside of an update, as in an evaluation,
        it does nothing. A tensor stays on its device until the log.

        Args:
            name (str): In the log.
            value (Tensor | float): A number, or a tensor of one element.
            weight (float, default 1.0): Of the number in the mean, such as its rows.

        Raises:
            ValueError: the log has another number by this name.
        """
        if name in _LOGGED:
            raise ValueError(f"log_mean: the log has {name!r} already; choose another")
        if not self._in_update:
            return
        if hasattr(value, "detach"):
            value = value.detach().double()
        total, weights = self._means.get(name, (0.0, 0.0))
        self._means[name] = total + value * weight, weights + weight

    def _take_means(self) -> dict[str, float]:
        """The means of log_mean() since the last call, of all ranks. Collective."""
        own = {name: [float(v) for v in pair] for name, pair in self._means.items()}
        self._means = {}
        if self.args.world_size == 1:
            each = [own]
        else:
            content = json.dumps(own).encode()
            texts = self._together("averaging what is logged", lambda: content)
            each = [json.loads(text) for text in texts]
        sums: dict[str, list[float]] = {}
        for of_rank in each:
            for name, (total, weight) in of_rank.items():
                had = sums.setdefault(name, [0.0, 0.0])
                had[0] += total
                had[1] += weight
        return {name: t / w if w else math.nan for name, (t, w) in sums.items()}

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add logs to state.log_history and fire on_log.

        Args:
            logs (dict[str, Any]): Numbers by name; "epoch" is added to them, and the
                tokens seen where they are counted.
            start_time (float | None, default None): The start of training in seconds
                since the epoch.
        """
        state = self.state
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        if self._counts_tokens:
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        if start_time is not None:
            logs.update(throughput.since(self, start_time))
        state.log_history.append({**logs, "step": state.global_step})
        self.control = self.callback_handler.on_log(
            self.args, state, self.control, logs=logs
        )

    def store_flos(self) -> None:
        """Move the operations counted since the last call, by all ranks, into
        state.total_flos, and their tokens into state.num_input_tokens_seen.

        All ranks have to call it.
        """
        self.state.total_flos += self._store_tokens(self.current_flos)
        self.current_flos = 0.0

    def _store_tokens(self, flos: float = 0.0) -> float:
        """Move the tokens counted since the last call, by all ranks, into the state;
        returns the sum of `flos` over the ranks."""
        flos, tokens = self._sum_over_ranks(flos, self._counted_tokens)
        if tokens:
            self.state.num_input_tokens_seen += int(tokens)
            self._counted_tokens = 0.0
        return flos

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> Any:
        """The norm of an update's gradients, as it is logged. Hook, called between
        clipping and update with the norm before clipping."""
        return self._last_grad_norm if grad_norm is None else grad_norm

    def _get_learning_rate(self) -> float:
        """The learning rate of the first parameter group's last update."""
        if self._schedule_on_metric or self.lr_scheduler is None:
            return float(self.optimizer.param_groups[0]["lr"])
        return float(self.lr_scheduler.get_last_lr()[0])

    def _log_window(self, learning_rate: float | None, start_time: float) -> None:
        """Log the mean of the finite losses since the last log, of all ranks; with none
        it is NaN, never 0."""
        step = self.state.global_step
        if learning_rate is None:
            learning_rate = self._get_learning_rate()
        self._read_device_loss()
        updates = step - self._window_start - self._window_bad
        logs = {
            "loss": self._mean_loss(self._window_loss, updates),
            "grad_norm": self._last_grad_norm,
            "learning_rate": learning_rate,
        }
        if self._nonfinite_steps:
            logs["nonfinite_steps"] = self._nonfinite_steps
        if self._spike_steps:
            logs["spike_steps"] = self._spike_steps
        logs.update(self._grad_metrics or {})
        self._grad_metrics = None
        logs.update(self._take_means())
        self._logged_loss += self._window_loss
        self._end_window()
        self.store_flos()
        self._call_hook("log", logs, start_time=start_time)

    def _end_window(self) -> None:
        """Begin the next window of the log after this update."""
        self._logged_bad += self._window_bad
        self._window_loss, self._window_bad, self._nonfinite_steps = 0.0, 0, 0
        self._spike_steps = 0
        self._window_start = self._globalstep_last_logged = self.state.global_step

    @property
    def _total_loss_scalar(self) -> float:
        """The sum of the losses that are logged. An override of
        _maybe_log_save_evaluate that logs a window itself adds its sum here, which
        ends the window."""
        return self._logged_loss

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, total: float) -> None:
        self._logged_loss = total
        self._end_window()

    def _take_layer_norms(self, epoch_ends: bool, loss_scale: float) -> None:
        """Keep the norms of layers for the log, if one follows this update."""
        args = self.args
        if not is_log_due(args, self.state, epoch_ends):
            return
        p = args.grad_norm_type
        power, merge = (1.0, np.maximum) if math.isinf(p) else (p, np.add)
        labels = self._adapter.parameter_labels(self.model, args.layer_grad_norm_depth)
        norms = self._adapter.layer_norms(self.optimizer, p)
        totals: dict[str, Any] = {}
        with np.errstate(all="ignore"):
            sums = np.array(list(norms.values()), np.float64) ** power
            if self._shard_group is not None:
                self._shard_group.all_reduce(sums, "sum" if merge is np.add else "max")
            for i, (param, of_one) in enumerate(zip(norms, sums, strict=True)):
                label = labels.get(param, f"parameter {i} of the optimizer")
                totals[label] = merge(totals.get(label, 0.0), of_one)
            self._grad_metrics = {
                f"grad_norm/{label}": float(total ** (1.0 / power) / loss_scale)
                for label, total in totals.items()
            }

    def _report_nonfinite(self, step: int) -> None:
        """Count update `step` of the run, whose gradients are not finite, for the next
        log; raise where the arguments ask for that, and else warn once in a run."""
        self._nonfinite_steps += 1
        policy = getattr(self.args, "nonfinite_policy", "skip")
        found = f"the gradients of step {step} are not finite (a NaN or Inf)"
        if policy == "stop":
            raise FloatingPointError(
                f"{found}; weights and optimizer are as they were before it. Look at "
                "the batch and the learning rate, or set nonfinite_policy='skip' to "
                "continue"
            )
        self._nonfinite_total += 1
        if self._nonfinite_total > 1:
            return
        done = "the update is skipped and the weights stay as they are"
        if policy == "keep":
            done = "updated all the same, as nonfinite_policy='keep' asks"
        warnings.warn(
            f"{found}: {done}. The log counts such steps as nonfinite_steps; "
            "nonfinite_policy='stop' raises instead",
            RuntimeWarning,
            stacklevel=2,
        )

    def _mean_loss(self, total: float, n: int) -> float:
        total, count = self._sum_over_ranks(total, n)
        return total / count if count > 0 else math.nan

    def _read_device_loss(self) -> None:
        """Add what was summed on a device to the window."""
        if self._device_loss is not None:
            steps = self.args.gradient_accumulation_steps
            loss, bad = self._adapter.read_device_loss(self._device_loss, steps)
            self._window_loss += loss
            self._window_bad += bad
            self._device_loss = None

    def _training_loss(self) -> float:
        """The mean loss of the run's updates so far, those before a resume included: of
        all ranks, which all have to call it."""
        self._read_device_loss()
        updates = self.state.global_step - self._logged_bad - self._window_bad
        mean = self._mean_loss(self._logged_loss + self._window_loss, updates)
        return mean if self.state.global_step > 0 else 0.0

    def _loss_state(self) -> dict[str, Any]:
        """What a resumed run needs to continue with the same sums: numbers."""
        self._read_device_loss()
        state = {key: getattr(self, name) for key, name in _SUMS.items()}
        if self._recent_norms:
            state["recent_norms"] = list(self._recent_norms)
        return state

    def _set_loss_state(self, **sums: Any) -> None:
        """Start the sums of losses anew, or from what _loss_state() returned."""
        self._recent_norms = tuple(map(float, sums.pop("recent_norms", ())))
        if sums.keys() - _SUMS:
            raise TypeError(f"{sorted(sums)} are not the sums {list(_SUMS)}")
        for key, name in _SUMS.items():
            setattr(self, name, sums.get(key, 0))
        self._device_loss = None

    # Copies, as hyper-parameter searches and processes that are spawned make them

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What copy and pickle take: the attributes, and the fields shared with C.

        Raises TypeError while train() runs, and in a group of several ranks.
        """
        if getattr(self, "is_in_train", False) or self._staged_folder is not None:
            raise TypeError(
                "a Trainer cannot be copied or pickled while its train() runs: copy it "
                "before or after, or save a checkpoint and resume another Trainer "
                "from it"
            )
        ranks = 1 if self._rank_group is None else self._communicator.world_size
        if ranks > 1:
            raise TypeError(
                f"a Trainer that has joined a group of {ranks} ranks cannot be copied "
                "or pickled: a process has one place in it. Copy the Trainer before it "
                "first trains or evaluates, or save a checkpoint"
            )
        self._read_device_loss()
        fields = {name: getattr(self, name) for name in _FIELDS - _OF_PROCESS}
        if self._adapter is not None:
            fields["_adapter"] = self._adapter.__name__
        return self.__dict__.copy(), fields

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Take over what __getstate__() of another Trainer returned."""
        own, fields = state if isinstance(state, tuple) and len(state) == 2 else (0, 0)
        if not isinstance(own, dict) or not isinstance(fields, dict):
            raise TypeError("Trainer.__setstate__ takes what __getstate__ returned")
        self.__dict__.update(own)
        for name, value in fields.items():
            setattr(
                self, name, adapters.by_name(value) if name == "_adapter" else value
            )


_LOGGED = frozenset(("loss", "grad_norm", "learning_rate", "epoch", "step"))
# Sums of losses in a checkpoint, and their fields.
_SUMS = {
    "window_loss": "_window_loss",
    "window_bad": "_window_bad",
    "total_loss": "_logged_loss",
    "total_bad": "_logged_bad",
    "window_start": "_window_start",
    "nonfinite_steps": "_nonfinite_steps",
    "nonfinite_total": "_nonfinite_total",
    "spike_steps": "_spike_steps",
    "spike_total": "_spike_total",
}
_FIELDS = frozenset(
    name
    for name, value in vars(_C.Trainer).items()
    if isinstance(value, MemberDescriptorType)
)
# Fields of a run under way, of the process or of the ranks.
_OF_PROCESS = frozenset(
    f"_{name}" for name in (
        "accelerator", "adapter", "batch_weight", "checkpoint_writer", "device_loss",
        "device_scale", "enqueued_average", "enqueued_engine", "enqueued_scaler",
        "enqueued_undo", "grad_metrics", "grads_scaled", "in_update", "rank_group",
        "skipped_update", "staged_folder", "syncs_gradients", "writes_checkpoint",
    )
)  # fmt: skip
