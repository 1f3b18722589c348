"""Trainer: what auto_find_batch_size does where a micro-batch runs out of memory.

The micro-batch is trained on in parts of half the rows, and so are later ones; after
100 updates parts twice as large are tried again. The rows of an update, its number,
the order of the data and the generators stay as they are, and each part weighs what it
has of the update's targets. That is the same update where the loss is a mean or a sum
over rows, which is tried out before the first split. C calls these functions; see
binding/trainer/loop.c.
"""

from __future__ import annotations

import logging
import math
import traceback
from typing import TYPE_CHECKING, Any

from ctrainer import _C

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")

_GROWTH_INTERVAL = 100  # updates
_TRIED = 8  # rows, of which the loss is compared with that of their halves
_TOLERANCE = 1e-3
_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def prepare(trainer: TrainerRun) -> None:
    """Ready a run: whole micro-batches, until one does not fit."""
    splits = bool(getattr(trainer.args, "auto_find_batch_size", False))
    if splits and trainer.args.world_size > 1 and not trainer._inputs_stay:
        raise ValueError(
            "auto_find_batch_size=True works on one GPU, or on ranks of CPUs: ranks "
            "with a GPU each would wait for the one that runs out of memory"
        )
    trainer._splits_batches = splits
    trainer._part_rows, trainer._part_kind = 0, None
    trainer._split_at, trainer._retried_at = 0, -1


def before(trainer: TrainerRun) -> tuple[Any, Any, Any]:
    """What recover() and rewind() need: states of the generators, what log_mean() has
    added up, and marks of the gradients."""
    adapter, means = trainer._adapter, dict(trainer._means)
    return adapter.rng_state(), means, adapter.gradient_marks(trainer.model)


def take_part(trainer: TrainerRun, inputs: Any, row: int) -> tuple[Any, float, int]:
    """The part of a batch from `row` on, what it weighs in the batch, and the first row
    after it, -1 where none is left."""
    rows, step = _C.find_batch_size(inputs), trainer.state.global_step
    if trainer._part_rows and step - trainer._split_at >= _GROWTH_INTERVAL:
        trainer._part_rows, trainer._split_at = 2 * trainer._part_rows, step
    limit = trainer._part_rows
    if not limit or rows is None or rows <= limit:
        return inputs, 1.0, -1
    end = min(row + limit, rows)
    part = _rows_of(inputs, rows, row, end)
    weight = 1.0
    if trainer._part_kind == "mean":
        whole = _weight(trainer, inputs, rows)  # 0 without any target
        weight = _weight(trainer, part, end - row) / whole if whole else 0.0
    return part, weight, end if end < rows else -1


def recover(
    trainer: TrainerRun, model: Any, began: tuple[Any, Any, Any], part: Any, error: Any
) -> bool:
    """Choose smaller parts after an error in one; True where the update has to begin
    anew, since some gradients have been added.

    A single row is tried once more. Raises the error itself where it is not about
    memory or that has failed, too; ValueError where the loss does not allow a split.
    """
    adapter, rows = trainer._adapter, _C.find_batch_size(part)
    step = trainer.state.global_step
    once_more = rows == 1 and trainer._retried_at != step
    if not is_out_of_memory(error) or rows is None or (rows < 2 and not once_more):
        raise error
    traceback.clear_frames(error.__traceback__)  # which hold what the pass has made
    adapter.empty_cache()
    generators, means, marks = began
    draws = not adapter.same_rng(adapter.rng_state(), generators)
    touched = bool(adapter.gradient_marks(trainer.model) != marks)
    if once_more:
        trainer._retried_at = step
    elif trainer._part_kind is None:
        trainer._part_kind = _kind_of_loss(trainer, model, part, rows)
    adapter.set_rng_state(generators)
    trainer._means, trainer._split_at = means, step
    if once_more:
        return touched
    trainer._part_rows = (rows + 1) // 2
    logger.warning(
        "Out of memory in a micro-batch of %d rows (%s): from here on at most %d rows "
        "are in memory at once. An update has the same rows as before%s.",
        rows, str(error).partition("\n")[0][:120], trainer._part_rows,
        ", but the model draws random numbers, as dropout does, which are others for "
        "parts" if draws else "",
    )  # fmt: skip
    return touched


def rewind(trainer: TrainerRun, began: tuple[Any, Any, Any]) -> None:
    """Begin an update anew: without gradients, with its generators and means."""
    generators, means, _ = began
    trainer._adapter.zero_grads(trainer.model)
    trainer._adapter.set_rng_state(generators)
    trainer._means = dict(means)  # the next beginning may be this one again


def is_out_of_memory(error: BaseException) -> bool:
    """Is it Python's, torch's or a library's report of too little memory?"""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _TEXTS)


def _rows_of(value: Any, n: int, begin: int, end: int) -> Any:
    """The rows of a batch, a mapping or list of tensors whose first dimension they are;
    what has no rows is in every part."""
    if hasattr(value, "keys"):
        parts = {key: _rows_of(value[key], n, begin, end) for key in value.keys()}
        return type(value)(parts)
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape) == 0 or (shape[0] == 1 and n != 1):
            return value
        if shape[0] != n:
            raise ValueError(
                f"auto_find_batch_size: a micro-batch of {n} rows has a tensor of "
                f"shape {tuple(shape)}, whose rows are not known, so the micro-batch "
                "cannot be split: lower per_device_train_batch_size and raise "
                "gradient_accumulation_steps instead"
            )
        return value[begin:end]
    if isinstance(value, list | tuple) and any(hasattr(v, "shape") for v in value):
        return type(value)([_rows_of(part, n, begin, end) for part in value])
    if isinstance(value, list | tuple) and len(value) == n:
        return value[begin:end]
    return value


def _weight(trainer: TrainerRun, batch: Any, rows: int) -> float:
    """Targets of the batch, where it has labels to count, or rows."""
    targets = trainer._count_targets([batch])
    return float(rows if targets < 0 else targets)


def _kind_of_loss(trainer: TrainerRun, model: Any, part: Any, rows: int) -> str:
    """Is the loss of rows the mean of the losses of their halves, or the sum? Both are
    computed for a few rows, without gradients and in evaluation mode.

    Raises ValueError for any other loss, unless split_coupled_rows allows it.
    """
    why = "normalizes by the other rows of the batch (BatchNorm)"
    if not trainer._adapter.normalizes_batches(model):
        kind = _compare(trainer, model, part, rows)
        if kind is not None:
            return kind
        why = "has a loss of rows that is neither the mean nor the sum of its parts'"
    if getattr(trainer.args, "split_coupled_rows", False):
        return "mean"
    raise ValueError(
        f"out of memory in a micro-batch of {rows} rows, and the model {why}, so parts "
        "of it would train differently: set split_coupled_rows=True to allow that, or "
        "lower per_device_train_batch_size"
    )


def _compare(trainer: TrainerRun, model: Any, batch: Any, rows: int) -> str | None:
    """By the loss of the first rows and the losses of their halves: "mean", "sum", or
    None for neither."""
    n = min(rows, _TRIED)
    while True:
        cuts = ((0, n), (0, n // 2), (n // 2, n))
        tried = [_rows_of(batch, rows, begin, end) for begin, end in cuts]
        try:
            with trainer._adapter.evaluated(model), trainer._adapter.no_grad():
                losses = [_loss(trainer, model, part) for part in tried]
            break
        except Exception as error:
            if not is_out_of_memory(error) or n == 2:
                raise
            n = max(n // 2, 2)
    weights = [
        _weight(trainer, part, end - begin)
        for part, (begin, end) in zip(tried, cuts, strict=True)
    ]
    whole, halves = losses[0], losses[1:]
    if not math.isfinite(whole) or not weights[0]:
        return None
    scale = _TOLERANCE * max(abs(x) for x in losses if math.isfinite(x))
    seen = [(w, x) for w, x in zip(weights[1:], halves, strict=True) if w]
    mean = sum(w * x for w, x in seen) / weights[0]
    if abs(whole - mean) <= scale:
        return "mean"
    return "sum" if abs(whole - sum(x for _, x in seen)) <= scale else None


def _loss(trainer: TrainerRun, model: Any, batch: Any) -> float:
    inputs = trainer._prepare_inputs(batch)
    with trainer.compute_loss_context_manager():
        loss = trainer._call_hook(
            "compute_loss", model, inputs, num_items_in_batch=None
        )
    return float(loss)
