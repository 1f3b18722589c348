"""Trainer: evaluate and predict, around the loop over batches, which is C's."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ctrainer import _C
from ctrainer.adapters.lengths import LongestFirst, TokenBatches
from ctrainer.arguments.accelerator import config_of
from ctrainer.comm.run import unpickled
from ctrainer.runtime import messages
from ctrainer.runtime.hooks import wrong_return
from ctrainer.runtime.notes import computed
from ctrainer.trainer import memory
from ctrainer.trainer.checkpoint import is_overridden, set_mode
from ctrainer.trainer.data import Reading, begin_reading, end_readings
from ctrainer.trainer.step import entry, is_mapping
from ctrainer.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    denumpify_detensorize,
    speed_metrics,
)

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")

KINDS = ("predictions", "label_ids", "inputs", "losses")  # as error messages name them


def evaluate(
    trainer: TrainerRun,
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
    dataset = trainer.eval_dataset if eval_dataset is None else eval_dataset
    if isinstance(dataset, dict):
        metrics: dict[str, float] = {}
        for name, one in dataset.items():
            # The trainer's own data sets by name, so that their loaders are kept.
            found = trainer._call_hook(
                "evaluate",
                eval_dataset=name if eval_dataset is None else one,
                ignore_keys=ignore_keys,
                metric_key_prefix=f"{metric_key_prefix}_{name}",
            )
            metrics.update(found)
        return metrics
    trainer._memory_tracker.start("eval")
    loader = trainer.get_eval_dataloader(dataset)
    loss_only = True if trainer.compute_metrics is None else None
    output = _measure(
        trainer, loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix
    )
    if trainer._counts_tokens:
        trainer._store_tokens()
    trainer.log(output.metrics)
    trainer.control = trainer.callback_handler.on_evaluate(
        trainer.args, trainer.state, trainer.control, output.metrics
    )
    trainer._memory_tracker.stop_and_update_metrics(output.metrics, "eval")
    return output.metrics  # type: ignore[no-any-return]


def predict(
    trainer: TrainerRun,
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
    trainer._memory_tracker.start("test")
    loader = trainer.get_test_dataloader(test_dataset)
    output = _measure(
        trainer, loader, "Prediction", None, ignore_keys, metric_key_prefix
    )
    trainer.control = trainer.callback_handler.on_predict(
        trainer.args, trainer.state, trainer.control, output.metrics
    )
    trainer._memory_tracker.stop_and_update_metrics(output.metrics, "test")
    return PredictionOutput(output.predictions, output.label_ids, output.metrics)


def _measure(
    trainer: TrainerRun,
    loader: Any,
    description: str,
    loss_only: bool | None,
    ignore_keys: list[str] | None,
    prefix: str,
) -> Any:
    """The loop's output, with averaged weights in the model where there are any, and
    the speed among the metrics."""
    start = time.time()
    legacy = getattr(trainer.args, "use_legacy_prediction_loop", False)
    with trainer._averaged_weights() or contextlib.nullcontext():
        output = trainer._call_hook(
            "prediction_loop" if legacy else "evaluation_loop",
            loader,
            description=description,
            prediction_loss_only=loss_only,
            ignore_keys=ignore_keys,
            metric_key_prefix=prefix,
        )
    n = output.num_samples
    steps = math.ceil(n / (trainer.args.eval_batch_size * trainer.args.world_size))
    output.metrics.update(speed_metrics(prefix, start, n, steps))
    return output


def evaluate_in_training(
    trainer: TrainerRun,
    trial: Any,
    ignore_keys_for_eval: list[str] | None,
    skip_scheduler: bool = False,
) -> dict[str, float]:
    """Evaluate within a training: report to a search, and step a learning rate that
    depends on a metric. Return the metrics."""
    metrics = trainer._call_hook("evaluate", ignore_keys=ignore_keys_for_eval)
    trainer._report_to_hp_search(trial, trainer.state.global_step, metrics)
    if trainer._schedule_on_metric and not skip_scheduler:
        name = trainer.args.metric_for_best_model
        key = "eval_" + ("loss" if name is None else name).removeprefix("eval_")
        if key not in metrics:
            raise KeyError(
                f"the learning rate depends on the metric {key!r} (from "
                f"metric_for_best_model), and evaluation gave only {list(metrics)}"
            )
        trainer.lr_scheduler.step(metrics[key])
    return metrics  # type: ignore[no-any-return]


def num_examples(trainer: TrainerRun, dataloader: Any) -> int:
    """Return the length of the loader's data set; without a length, batches times
    per_device_train_batch_size.

    Args:
        dataloader (Iterable): A loader of batches.

    Raises:
        TypeError: the loader has no length.
    """
    try:
        return len(dataloader.dataset)
    except (AttributeError, TypeError):
        return len(dataloader) * int(trainer.args.per_device_train_batch_size)


# The loop


def evaluation_loop(
    trainer: TrainerRun,
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
        ValueError: there is no batch. An override of this method may have none, and
            gets metrics without a loss.
    """
    args, compute = trainer.args, trainer.compute_metrics
    n_rows = _length(getattr(dataloader, "dataset", None))
    sinks = _sinks(args, n_rows)
    keeps_losses = "loss" in args.include_for_metrics
    by_batch = _MetricsByBatch(compute, keeps_losses)
    with _evaluated_model(trainer) as model:
        known = _length(dataloader) is not None
        shown = f" = {trainer.num_examples(dataloader)}" if known else ": Unknown"
        messages.evaluating(description, shown, args.eval_batch_size)
        trainer.callback_handler.eval_dataloader = dataloader
        if getattr(trainer, "_past", None) is not None:
            trainer._past = None
        loss_only = args.prediction_loss_only
        if prediction_loss_only is not None:
            loss_only = prediction_loss_only
        # By default a batch's results are waited for behind the next one's forward.
        steps = args.eval_accumulation_steps
        n_batches, n_seen, loss, loss_by_token = _run_batches(
            trainer,
            dataloader,
            _taker(trainer, model, loss_only, ignore_keys),
            sinks=sinks[:3],
            max_waiting=0 if trainer._inputs_stay else int(steps or 1),
            keeps_values=not args.batch_eval_metrics or description == "Prediction",
            by_token=getattr(args, "eval_loss_by_token", False),
            keep_losses=(lambda x, n: sinks[3].append(np.full(n, x, np.float32)))
            if keeps_losses
            else None,
            on_batch=by_batch if args.batch_eval_metrics else None,
            parts=memory.for_evaluation(trainer, model),
        )
    if n_batches == 0 and not is_overridden(trainer, "evaluation_loop"):
        raise ValueError(
            f"{description} got no batch: the dataset is empty, or smaller than a "
            "batch with dataloader_drop_last"
        )
    arrays = dict(zip(KINDS, map(_arrays, sinks), strict=True))
    _in_order_of_rows(dataloader, arrays)
    metrics = by_batch.metrics
    if n_rows is None and _length(dataloader) is not None:
        n_rows = trainer.num_examples(dataloader)
    labelled = arrays["predictions"] is not None and arrays["label_ids"] is not None
    if compute is not None and labelled and not args.batch_eval_metrics:
        metrics = computed(compute, EvalPrediction(**arrays), trainer)
    losses = {"loss": loss, "loss_by_token": loss_by_token}
    return EvalLoopOutput(
        arrays["predictions"],
        arrays["label_ids"],
        _with_prefix(metrics, losses, metric_key_prefix),
        n_rows or n_seen,
    )


def _run_batches(
    trainer: TrainerRun, loader: Any, take: Callable[..., Any], **options: Any
) -> tuple[int, int, float | None, float | None]:
    batches, kept = trainer._evaluation_batches(loader), len(trainer._readings)
    reading = Reading(loader, _length(loader))
    begin_reading(trainer, reading)
    ranks = None
    try:
        if trainer._communicator.world_size == 1:
            return trainer._evaluate_batches(take, batches, **options, exchange=None)
        ranks = _Ranks(trainer, loader, reading)
        return trainer._evaluate_batches(
            take, ranks.rounds(batches), **options, exchange=ranks.exchange
        )
    except BaseException as error:
        if ranks is not None:
            ranks.report(error)
        raise
    finally:
        trainer._dummy_batch = False
        end_readings(trainer, kept)


def _length(sized: Any) -> int | None:
    """len(sized), None where it has none."""
    try:
        return len(sized)
    except MemoryError:
        raise
    except Exception:
        return None


@contextlib.contextmanager
def _evaluated_model(trainer: TrainerRun) -> Iterator[Any]:
    """The wrapped model in eval mode, outside of a training in the dtype of a full
    evaluation; then as it was.

    A training continues with the model in eval mode until the next training_step, as in
    transformers, by which logs and callbacks recognize evaluations. A model without the
    flag `training`, or whose evaluation has failed, is put back at once.
    """
    args, adapter, in_train = trainer.args, trainer._adapter, trainer.is_in_train
    model = trainer._call_hook("_wrap_model", trainer.model, training=False)
    uncast: Callable[[], Any] | None = None

    def release(failed: bool) -> None:
        if in_train:
            stays = not failed and hasattr(model, "training")
            set_mode("train", trainer.optimizer, None if stays else model)
            return
        if uncast is not None:
            uncast()
        adapter.leave_mixed_precision(model)

    try:
        if not in_train and (args.fp16_full_eval or args.bf16_full_eval):
            dtype = "float16" if args.fp16_full_eval else "bfloat16"
            uncast = adapter.cast_model(model, dtype, args.device)
        set_mode("eval", model, trainer.optimizer)
        yield model
    except BaseException:
        with contextlib.suppress(Exception):  # the first failure is the one to raise
            release(failed=True)
        raise
    release(failed=False)


def _taker(
    trainer: TrainerRun, model: Any, loss_only: bool, ignore_keys: list[str] | None
) -> Callable[[Any, int, int], tuple[Any, ...]]:
    """Runs a batch; returns (predictions, labels, inputs, whole inputs, loss, rows,
    targets), the first three as a gather_function that the user has set returns
    them."""
    args, preprocess = trainer.args, trainer.preprocess_logits_for_metrics
    gather, keep_input = vars(trainer).get("gather_function"), _main_input(trainer)

    def take(inputs: Any, rows: int, targets: int) -> tuple[Any, ...]:
        trainer._readings[-1].begin_batch()
        rows = _rows_of_texts(inputs) or rows
        answer = trainer._call_hook(
            "prediction_step", model, inputs, loss_only, ignore_keys=ignore_keys
        )
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            wanted = "return (loss, predictions, labels)"
            raise TypeError(wrong_return(trainer, "prediction_step", answer, wanted))
        loss, predictions, labels = answer
        if preprocess is not None and predictions is not None:
            predictions = preprocess(predictions, labels)
        kept = None if keep_input is None else keep_input(inputs)
        values = [predictions, labels, kept]
        if gather is not None:
            values = [None if value is None else gather(value) for value in values]
        whole = inputs if keep_input is not None and args.batch_eval_metrics else None
        if rows < 0:  # a batch without a tensor
            rows = args.eval_batch_size
        return *values, whole, loss, 0 if trainer._dummy_batch else rows, targets

    return take


def _rows_of_texts(batch: Any) -> int | None:
    """The rows of a batch that has texts, which the model tokenizes. Its tensors need
    not be of rows: cross encoders of sentence-transformers have one of each row."""
    for value in batch.values() if isinstance(batch, dict) else ():
        if isinstance(value, list) and value and isinstance(value[0], str):
            return len(value)
    return None


def _sinks(args: Any, n_rows: int | None) -> tuple[Any, ...]:
    """Where the values of each kind go: one array for all batches, or a list."""
    if not args.eval_do_concat_batches:
        return tuple([] for _ in KINDS)
    spill = getattr(args, "eval_spill_bytes", None)
    folder = "." if spill is None else tempfile.gettempdir()
    return tuple(
        _C.ArrayAccumulator(n_rows, name=name, spill_bytes=spill, spill_folder=folder)
        for name in KINDS
    )


def _arrays(sink: Any) -> Any:
    """What a sink has collected, None for nothing."""
    return (sink or None) if isinstance(sink, list) else sink.result()


def _in_order_of_rows(loader: Any, arrays: dict[str, Any]) -> None:
    """Results of batches by length, in place, in the order of the data set."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    if not isinstance(sampler, LongestFirst | TokenBatches):
        return
    order = sampler.order
    found = {kind: list(_parts(nested)) for kind, nested in arrays.items()}
    for kind, parts in found.items():
        if any(len(part) != len(order) for part in parts):
            logger.warning(
                "Evaluation by length: %s have not one row for each of the data set's, "
                "so all results stay in the order of length; return such a sampler as "
                "you want from _get_eval_sampler.", kind,
            )  # fmt: skip
            return
    for part in itertools.chain.from_iterable(found.values()):
        _C.move_rows(part, order)


def _parts(nested: Any) -> Iterator[Any]:
    if isinstance(nested, dict | tuple | list):
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from _parts(part)
    elif nested is not None:
        yield nested


def _repeated_after(loader: Any) -> int:
    """Rows after which a loader of accelerate repeats some, to be even; -1: never."""
    length = getattr(loader, "total_dataset_length", None)
    return length if isinstance(length, int) else -1


def _main_input(trainer: TrainerRun) -> Callable[[Any], Any] | None:
    """Takes out of a batch what compute_metrics gets as inputs, if it gets any."""
    if "inputs" not in trainer.args.include_for_metrics:
        return None
    name = getattr(trainer.model, "main_input_name", "input_ids")

    def keep(inputs: Any) -> Any:
        if not hasattr(inputs, "keys"):
            raise TypeError(
                f"include_for_metrics has 'inputs', which are the batch's {name!r}, "
                f"and the batch is a {type(inputs).__name__}; return dicts from the "
                "data_collator, or leave 'inputs' out"
            )
        return trainer._prepare_input(inputs[name])

    return keep


class _MetricsByBatch:
    """compute_metrics of each batch alone; `metrics` is what the last one returned."""

    def __init__(self, compute: Callable[..., Any] | None, keeps_losses: bool) -> None:
        self.compute = compute
        self.keeps_losses = keeps_losses
        self.metrics: Any = {}

    def __call__(self, batch: tuple[Any, ...], is_last: bool) -> None:
        predictions, labels, _, inputs, loss, rows, _ = batch
        if self.compute is None or predictions is None or labels is None:
            return
        keeps = self.keeps_losses and loss is not None
        self.metrics = self.compute(
            EvalPrediction(
                predictions, labels, inputs, loss.repeat(rows) if keeps else None
            ),
            compute_result=is_last,
        )


def _with_prefix(metrics: Any, losses: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The metrics as plain numbers, and the losses that there are, under names that
    begin with the prefix. A metric that compute_metrics calls "loss" replaces the mean
    of the losses, as in transformers."""
    if not isinstance(metrics, dict):
        raise TypeError(
            f"compute_metrics must return a dict of names to numbers, got {metrics!r}"
        )
    named = dict(denumpify_detensorize(metrics))
    for name in named:
        if not isinstance(name, str):
            raise TypeError(
                f"compute_metrics must name its metrics by strings, got {name!r}"
            )
    named |= {f"{prefix}_{k}": v for k, v in losses.items() if v is not None}
    has = {k: v for k, v in named.items() if k.startswith(f"{prefix}_")}
    return has | {f"{prefix}_{k}": v for k, v in named.items() if k not in has}


# One batch


def prediction_step(
    trainer: TrainerRun,
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
    names, with_loss = tuple(trainer.label_names), True
    if is_mapping(inputs):  # any other can be run by an override of compute_loss
        given = [entry(inputs, name) for name in names]
        with_loss = bool(given) and all(value is not None for value in given)
        if not names:
            said = entry(inputs, "return_loss")  # of models such as CLIP
            with_loss = bool(trainer.can_return_loss if said is None else said)
    given, inputs = inputs, trainer._prepare_inputs(inputs)
    if is_overridden(trainer, "_prepare_inputs") or not trainer._prepares_plainly():
        given = inputs  # with other labels, perhaps
    ignored = _ignored(trainer) if ignore_keys is None else list(ignore_keys)
    labels = None
    if with_loss:  # compute_loss may pop them
        labels = _C.nested_detach(tuple(entry(inputs, name) for name in names))
        labels = labels[0] if len(labels) == 1 else labels
        ignored.append("loss")
    loss, outputs = _forward(trainer, model, inputs, with_loss, given)
    if prediction_loss_only:
        return loss, None, None
    return loss, _predictions(outputs, ignored, with_loss), labels


def _forward(
    trainer: TrainerRun, model: Any, inputs: Any, with_loss: bool, given: Any
) -> tuple[Any, Any]:
    """The loss, None without one, and the outputs.

    given: the batch whose labels are counted, as far as possible in host memory, where
    counting waits for no device.
    """
    with trainer._adapter.no_grad(), trainer.compute_loss_context_manager():
        if with_loss:
            return _loss_and_outputs(trainer, model, inputs, given)
        outputs = model(**inputs)
        index = getattr(trainer.args, "past_index", -1)
        if index >= 0:  # it counts the loss, and these outputs have none
            trainer._past = outputs[index - 1]
        return None, outputs


def _ignored(trainer: TrainerRun) -> list[str]:
    """Outputs that the model's configuration says are no predictions."""
    if not hasattr(trainer.model, "config"):
        return []
    missing = ["past_key_values"]
    return list(getattr(trainer.model.config, "keys_to_ignore_at_inference", missing))


def _loss_and_outputs(
    trainer: TrainerRun, model: Any, inputs: Any, given: Any
) -> tuple[Any, Any]:
    """What compute_loss returns, the loss without its graph, and as one number."""
    parts = trainer._evaluations
    if parts is not None and parts.counted is not None:
        (count,) = parts.counted
    else:
        count = trainer._get_num_items_in_batch([given], trainer.args.device)
    pair = trainer._call_hook(
        "compute_loss", model, inputs, return_outputs=True,
        num_items_in_batch=count,
    )  # fmt: skip
    if not isinstance(pair, tuple) or len(pair) != 2:
        wanted = (
            "return (loss, outputs) with return_outputs=True: evaluation needs both"
        )
        raise TypeError(wrong_return(trainer, "compute_loss", pair, wanted))
    loss, outputs = pair
    if hasattr(loss, "detach"):
        loss = loss.detach()
        loss = loss.mean() if len(loss.shape) > 0 else loss
    return loss, outputs


def _predictions(outputs: Any, ignored: list[str], with_loss: bool) -> Any:
    """The predictions among the outputs, detached; a single one stands alone. A bare
    tensor is one: transformers would take its first row for the loss."""
    if hasattr(outputs, "keys"):
        outputs = tuple(outputs[key] for key in outputs.keys() if key not in ignored)
    elif with_loss and isinstance(outputs, tuple | list):
        outputs = outputs[1:]
    found = _C.nested_detach(outputs)
    return found[0] if isinstance(found, tuple | list) and len(found) == 1 else found


# Several ranks

# In place of the rows of a rank's batch; 0: it has none
_STOPPED, _FAILED = -1, -2


class _Ranks:
    """The exchange between the ranks of an evaluation.

    All run equally many batches of equally many rows, since a hook or a wrapped model
    may contain collectives: in the last round, ranks with fewer rows than others run
    after these, and each rank without a batch of its own runs one of that length again,
    as a dummy batch of no rows. After each batch a small collective shows who continues
    and who has failed; the values follow. A failure of a rank is raised on all.
    """

    def __init__(self, trainer: TrainerRun, loader: Any, reading: Reading) -> None:
        self.trainer = trainer
        self.group = trainer._communicator
        self.left = _repeated_after(loader)  # rows still wanted of it; -1: all
        # the user's gather_function joins the values
        self.gathered = "gather_function" in vars(trainer)
        self.reported = False  # do all ranks know of the failure?
        self.reading = reading
        lengths = self.each(-1 if reading.batches is None else reading.batches)
        reading.batches = None if lengths.min() < 0 else int(lengths.max())
        config = config_of(getattr(trainer.args, "accelerator_config", None))
        sizes = (getattr(loader, f"{of}batch_size", None) for of in ("total_", ""))
        self.evens = config.even_batches and any(sizes)

    def rounds(self, batches: Any) -> Iterator[Any]:
        """This rank's batches and its dummy batches, as long as there are ranks that
        continue."""
        iterator, none = iter(batches), self  # no batch is None
        batch, dummy = next(iterator, none), None
        held = np.zeros(self.group.world_size, np.int64)  # rows of the last batches
        rows = self.sync(0 if batch is none else _rows(batch))
        while rows.any():
            sizes = np.unique(rows[rows > 0])[::-1] if self.evens else [rows.max()]
            for n, size in enumerate(sizes):
                if n > 0:
                    self.sync(1)
                runs = rows == size if self.evens else rows > 0
                if not runs.all():
                    first = int(runs.argmax())
                    in_order = runs[: runs.sum()].all()
                    if not in_order or (held[~runs] != rows[first]).any():
                        dummy = self.broadcast(batch, first)
                        held[~runs] = rows[first]
                    self.reading.end_of_dataloader = True
                    self.reading.remainder = int(rows[runs].sum())
                counts = bool(runs[self.group.rank])
                dummy = batch if counts else dummy
                held[runs] = rows[runs]
                self.trainer._dummy_batch = not counts
                yield dummy
                self.trainer._dummy_batch = False
            batch = next(iterator, none) if rows[self.group.rank] > 0 else none
            rows = self.sync(0 if batch is none else _rows(batch))

    def collective(self, run: Callable[..., Any], *args: Any) -> Any:
        """run(*args), whose failures all ranks raise, naming what they were doing."""
        self.reported = True
        try:
            return run(*args)
        except (RuntimeError, ValueError) as error:
            raise type(error)(f"evaluation: {error}") from error

    def each(self, own: int) -> Any:
        """This number of every rank."""
        numbers = np.empty(self.group.world_size, np.int64)
        self.collective(self.group.all_gather, numbers, np.array([own]))
        self.reported = False
        return numbers

    def sync(self, rows: int) -> Any:
        """The rows of every rank's batch. Raises where one has failed or was
        stopped."""
        numbers = self.each(rows)
        for rank, theirs in enumerate(numbers):
            self.reported = theirs < 0
            if theirs == _STOPPED:
                raise KeyboardInterrupt
            if theirs == _FAILED:
                raise _failure_of(rank)
        return numbers

    def report(self, error: BaseException) -> None:
        """Let the other ranks raise, too, unless they do already."""
        if self.reported:
            return
        code = _STOPPED if isinstance(error, KeyboardInterrupt) else _FAILED
        with contextlib.suppress(BaseException):  # the first failure is reported
            for _ in range(3):  # others were in a sharded pass, and have raised, too
                with contextlib.suppress(ValueError):
                    self.sync(code)

    def broadcast(self, batch: Any, root: int) -> Any:
        """The batch of rank `root` on every rank."""
        data = None
        if self.group.rank == root:
            try:
                data = pickle.dumps(batch, -1)
            except Exception:  # the others must not wait for it
                logger.exception("A batch of rank %d cannot be pickled.", root)
                data = b""
        data = self.collective(self.group.broadcast_bytes, data, root)
        if not data:
            raise RuntimeError(
                f"rank {root} has the only batch of this evaluation, and pickle cannot "
                "send it to the others; give each rank a batch of its own"
            )
        self.reported = False
        return batch if self.group.rank == root else unpickled(data, root)

    def exchange(self, batch: tuple[Any, ...], as_tensors: bool) -> list[Any]:
        """The batches of all ranks in this round, (predictions, labels, inputs, whole
        inputs, loss, rows, targets): each row once, as far as it is wanted. as_tensors:
        values that are tensors here arrive as tensors, else as arrays."""
        *values, whole, loss, rows, targets = batch
        sent = (None, None, None, whole) if self.gathered else (*values, whole)
        try:
            nodes = _C.nested_flatten(sent) if rows > 0 else []
            message = pickle.dumps((rows, targets, _number(loss), nodes), -1)
        except BaseException:
            with contextlib.suppress(Exception):  # no message: it has failed
                self.collective(self.group.gather_bytes, b"")
            raise
        messages = self.collective(self.group.gather_bytes, message)
        if b"" in messages:
            raise _failure_of(messages.index(b""))
        self.reported = False
        batches = []
        for rank in range(len(messages)):
            rows, targets, mean, nodes = unpickled(messages[rank], rank)
            messages[rank] = b""
            kept = rows if self.left < 0 else min(rows, self.left)
            self.left -= kept if self.left > 0 else 0
            if kept == 0:
                continue
            if as_tensors and mean is not None and hasattr(loss, "new_tensor"):
                mean = loss.new_tensor(mean)
            found = _C.nested_rebuild(nodes, sent, rank, rows, kept, as_tensors)
            batches.append((*found, mean, kept, targets))
        if self.gathered:  # every rank has the joined values; the losses are counted
            batches.append((*values, whole, None, 0, 0))
        return batches


def _rows(batch: Any) -> int:
    """The rows of a batch; 1 where they are not known."""
    return _C.find_batch_size(batch) or 1


def _failure_of(rank: int) -> RuntimeError:
    return RuntimeError(f"evaluation: rank {rank} failed; its own error says why")


def _number(loss: Any) -> float | None:
    """The mean of a loss."""
    if loss is None:
        return None
    vector = len(getattr(loss, "shape", ())) > 0
    return math.ldexp(loss.mean() if vector else loss, 0)  # of a number, not a text
