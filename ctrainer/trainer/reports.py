"""Trainer: errors and warnings of the loop, which C calls by name."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun


def different_batches(trainer: TrainerRun, n: int, without: int) -> None:
    """Raise on every rank, unless the arguments let the ranks have different numbers of
    batches for an update: here n, and none on `without` ranks, which ends the epoch."""
    step = trainer.state.global_step
    trainer._ranks_differ(
        f"the ranks have different numbers of batches for update {step + 1}",
        f"has {n}",
    )
    if n > 0 and without > 0:
        group = trainer._communicator
        warnings.warn(
            f"the epoch ends after step {step}, where {without} of {group.world_size} "
            f"ranks have no batch left; {n} batches of rank {group.rank} are not "
            "trained on. even_batches in accelerator_config gives all ranks equally "
            "many",
            stacklevel=2,
        )


def no_batches(trainer: TrainerRun) -> None:
    """Stop a run whose epoch has no batch, with a warning."""
    trainer.control.should_training_stop = True
    warnings.warn(
        "the train dataloader gave no batch; training stops at step "
        f"{trainer.state.global_step}. An iterable dataset that ends cannot be read "
        "again unless its __iter__ starts anew",
        stacklevel=2,
    )


def empty_batch(trainer: TrainerRun) -> NoReturn:
    """Name the columns that the model accepts, of which a batch has none."""
    raise ValueError(
        "the batch is empty, so the model has nothing to train on; give the dataset at "
        "least one of the columns that the model's forward accepts: "
        f"{trainer._signature_columns}"
    )


def no_loss(outputs: dict[str, Any], inputs: Any) -> NoReturn:
    """Name the outputs of a model, among which there is no loss."""
    raise ValueError(
        f"the model returned no loss, only {list(outputs)}, for the inputs "
        f"{list(inputs)}; give it labels, pass compute_loss_func, or override "
        "compute_loss"
    )
