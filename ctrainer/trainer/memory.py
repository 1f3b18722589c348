"""Trainer: what auto_find_batch_size splits, the micro-batches of training and the
batches of evaluation; see ctrainer/runtime/parts.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ctrainer.runtime.parts import Parts

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

    def __init__(self, trainer: TrainerRun, model: Any) -> None:
        self.trainer, self.model = trainer, model
        super().__init__(trainer._adapter)

    def step(self) -> int:
        return self.trainer.state.global_step

    def weight(self, batch: Any, rows: int) -> float:
        """Targets of the batch, where it has labels to count, or rows."""
        targets = self.trainer._count_targets([batch])
        return float(rows if targets < 0 else targets)

    def evaluated(self) -> Any:
        return self._adapter.evaluated(self.model)

    def coupled(self) -> str:
        if getattr(self.trainer.args, "split_coupled_rows", False):
            return ""
        return (
            "set split_coupled_rows=True to allow that, or lower "
            "per_device_train_batch_size"
        )


class MicroBatches(OfTrainer):
    """Of training; the sums are log_mean()'s."""

    def modules(self) -> Sequence[Any]:
        return (self.trainer.model,)

    def measure(self, batch: Any) -> tuple[float, ...]:
        trainer = self.trainer
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss = trainer._call_hook(
                "compute_loss", self.model, inputs, num_items_in_batch=None
            )
        return (float(loss),)

    def sums(self) -> Any:
        return dict(self.trainer._means)

    def set_sums(self, sums: Any) -> None:
        self.trainer._means = dict(sums)  # the same beginning may come again
