"""Trainer: what auto_find_batch_size splits, the micro-batches of training and the
batches of evaluation; see ctrainer/runtime/parts.py."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctrainer import _C
from ctrainer.runtime.parts import Parts
from ctrainer.trainer_pt_utils import nested_concat

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun


def prepare(trainer: TrainerRun, model: Any) -> None:
    """Ready a run: whole micro-batches, until one does not fit."""
    splits = bool(getattr(trainer.args, "auto_find_batch_size", False))
    if splits and trainer.args.world_size > 1 and not trainer._inputs_stay:
        raise ValueError(
            "auto_find_batch_size=True works on one GPU, or on ranks of CPUs: ranks "
            "with a GPU each would wait for the one that runs out of memory"
        )
    trainer._parts = MicroBatches(trainer, model) if splits else None


class OfTrainer(Parts):
    """What training and evaluation share. `model` is the wrapped one."""

    size = "per_device_train_batch_size"

    def __init__(self, trainer: TrainerRun, model: Any) -> None:
        self.trainer, self.model = trainer, model
        super().__init__(trainer._adapter)

    def step(self) -> int:
        return self.trainer.state.global_step

    def weight(self, batch: Any, rows: int) -> float:
        """Targets of the batch, where it has labels to count, or rows."""
        targets = self.trainer._count_targets([batch])
        return float(rows if targets < 0 else targets)

    def sums(self) -> Any:
        return dict(self.trainer._means)

    def set_sums(self, sums: Any) -> None:
        self.trainer._means = dict(sums)  # the same beginning may come again

    def coupled(self) -> str:
        if getattr(self.trainer.args, "split_coupled_rows", False):
            return ""
        return f"set split_coupled_rows=True to allow that, or lower {self.size}"


class MicroBatches(OfTrainer):
    """Of training."""

    def modules(self) -> Sequence[Any]:
        return (self.trainer.model,)

    def evaluated(self) -> Any:
        return self._adapter.evaluated(self.model)

    def measure(self, batch: Any) -> tuple[float, ...]:
        trainer = self.trainer
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss = trainer._call_hook(
                "compute_loss", self.model, inputs, num_items_in_batch=None
            )
        return (float(loss),)


class _NoLossError(Exception):
    """Batches have none, as those of predict() without labels."""


class Evaluations(OfTrainer):
    """Of evaluations: what prediction_step returns of the parts of a batch becomes what
    it returns of the batch."""

    what = "a batch of an evaluation"
    size = "per_device_eval_batch_size"

    def evaluated(self) -> Any:
        return contextlib.nullcontext()

    def measure(self, batch: Any) -> tuple[float, ...]:
        loss, _, _ = self.trainer._call_hook(
            "prediction_step", self.model, batch, True, ignore_keys=None
        )
        if loss is None:
            raise _NoLossError
        return (float(_mean(loss)),)

    def _kind(self, part: Any, rows: int) -> str | None:
        with contextlib.suppress(_NoLossError):
            return super()._kind(part, rows)
        return None

    def join(
        self, batch: Any, targets: int, taken: list[tuple[tuple[Any, ...], float]]
    ) -> tuple[Any, ...]:
        """The batch that _evaluate_batches() keeps, of what `take` returned of each
        part, and what the part weighs. Called by C."""
        items = [item for item, _ in taken]
        if len(items) == 1:
            return (*items[0][:-1], targets)
        first, n_rows = items[0], [item[-2] for item in items]
        for item in items:
            self._check_rows(item[:3], item[-2])
        values = [_concat([item[i] for item in items]) for i in range(3)]
        losses = [_mean(item[4]) for item in items]
        if losses[0] is not None and self.kind is None:
            rows = _C.find_batch_size(batch)
            self.kind = self._kind(batch, 1 if rows is None else rows)
        whole = None if first[3] is None else batch
        loss = self._loss_of(losses, [weight for _, weight in taken])
        return *values, whole, loss, sum(n_rows), targets

    def _loss_of(self, losses: list[Any], weights: list[float]) -> Any:
        if losses[0] is None:
            return None
        if self.kind == "sum":
            return sum(losses[1:], start=losses[0])
        parts = [w * x for w, x in zip(weights, losses, strict=True) if w]
        return sum(parts[1:], start=parts[0]) if parts else losses[0]

    def _check_rows(self, values: Any, rows: int) -> None:
        """Raise ValueError for an output that is not of rows."""
        for value in (v for v in _tensors(values) if rows > 0):
            shape = tuple(value.shape)
            if not shape or shape[0] % rows:
                raise ValueError(
                    f"out of memory in {self.what}, and prediction_step returns an "
                    f"output of shape {shape} for {rows} rows, so that what it returns "
                    "of parts cannot be put together: leave it out by ignore_keys, or "
                    f"lower {self.size}"
                )


def for_evaluation(trainer: TrainerRun, model: Any) -> Evaluations | None:
    """What splits the batches of an evaluation of this model; None where they are not
    to be split, or calls of prediction_step belong to collectives or to each other."""
    args = trainer.args
    if not getattr(args, "auto_find_batch_size", False) or trainer._shard_group:
        return None
    if getattr(args, "past_index", -1) >= 0 or "gather_function" in vars(trainer):
        return None
    found = trainer._evaluations
    if not isinstance(found, Evaluations):
        trainer._evaluations = found = Evaluations(trainer, model)
    found.model = model
    return found


def _mean(loss: Any) -> Any:
    """An override of prediction_step may return the losses of rows."""
    return loss.mean() if len(getattr(loss, "shape", ())) > 0 else loss


def _tensors(value: Any) -> Any:
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)
    elif hasattr(value, "shape"):
        yield value


def _concat(values: list[Any]) -> Any:
    """The rows of all; shorter ones are filled with -100, as those of batches are."""
    while len(values) > 1 and values[0] is not None:
        pairs = zip(values[::2], values[1::2], strict=False)
        rest = values[-1:] if len(values) % 2 else []
        values = [*(nested_concat(a, b) for a, b in pairs), *rest]
    return values[0]
