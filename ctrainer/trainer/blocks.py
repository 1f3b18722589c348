"""Trainer: local steps through ctrainer.BMUF, to which C reports updates, synchronized
at the ends of blocks."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ctrainer.arguments.bmuf import options_of, way_of
from ctrainer.checkpoint.files import naming
from ctrainer.trainer.checkpoint import add_object, save_object

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")

FILE = "blocks.pt"


def make_blocks(trainer: TrainerRun) -> None:
    """Make self._blocks if the arguments ask for it and there are several ranks:
    all begin with the first one's parameters."""
    way, group = way_of(trainer.args), trainer._communicator
    trainer._blocks = None
    if way is None or group.world_size == 1:
        return
    from ctrainer.bmuf import BMUF

    look = "nesterov" if way == "use_diloco" else None
    blocks = BMUF(
        SimpleNamespace(**options_of(trainer.args, way)),
        trainer.optimizer,
        group,
        look=look,
    )
    blocks.regroup(group)
    trainer._blocks = blocks


def save_blocks(trainer: TrainerRun, output_dir: str) -> None:
    """Save blocks.pt: how many updates the block has, the model that it began with
    and the momentum, with local steps; of every rank but the first, whose own
    are the checkpoint's, blocks_RANK.pt: its weights, its optimizer. Hook."""
    if trainer._blocks is None:
        return
    if trainer.args.process_index > 0:
        add_object(trainer, output_dir, own_file(trainer), own_parts(trainer))
    save_object(
        trainer, output_dir, FILE, trainer._blocks.blocks_state_dict(), "_save_blocks"
    )


def load_blocks(trainer: TrainerRun, checkpoint: str | None) -> None:
    """Load blocks.pt, without which a block begins with the weights, and what is
    this rank's own. Hook."""
    if checkpoint is None or trainer._blocks is None:
        return
    state = trainer._adapter.checkpoints.load_object(checkpoint, FILE)
    if state is None:
        logger.warning("%s has no %s: a block begins with its weights",
                       checkpoint, FILE)  # fmt: skip
    own = read_own_parts(trainer, checkpoint)
    with naming(os.path.join(checkpoint, FILE if not own else own_file(trainer))):
        blocks = {**(state or {}), **own.get("blocks", {})}
        trainer._blocks.load_blocks_state_dict(blocks)
        if own:
            load_own_parts(trainer, own)


def end_blocks(trainer: TrainerRun) -> None:
    """Apply the average that is still pending after the last update."""
    if trainer._blocks is not None:
        trainer._blocks.finish()


def own_file(trainer: TrainerRun) -> str:
    return f"blocks_{trainer.args.process_index}.pt"


def own_parts(trainer: TrainerRun) -> dict[str, Any]:
    """The state that differs between ranks."""
    assert trainer._blocks is not None
    state = {name: part.state_dict() for name, part in stateful_parts(trainer)}
    state["blocks"] = trainer._blocks.own_state_dict()
    state["weights"] = trainer._adapter.checkpoints.trained_state(trainer.model)
    return state


def read_own_parts(trainer: TrainerRun, checkpoint: str) -> dict[str, Any]:
    """This rank's own_parts(); {} where the checkpoint has none."""
    if trainer.args.process_index == 0 or not trainer._resumes_ranks:
        return {}
    state = trainer._adapter.checkpoints.load_object(checkpoint, own_file(trainer))
    if state is None:
        logger.warning(
            "%s has no %s: rank %d continues with the first rank's weights and "
            "optimizer",
            checkpoint, own_file(trainer), trainer.args.process_index,
        )  # fmt: skip
    return state or {}


def load_own_parts(trainer: TrainerRun, state: dict[str, Any]) -> None:
    trainer._adapter.checkpoints.load_trained_state(trainer.model, state["weights"])
    for name, part in stateful_parts(trainer):
        part.load_state_dict(state[name])


def stateful_parts(trainer: TrainerRun) -> list[tuple[str, Any]]:
    parts = {
        "optimizer": trainer.optimizer,
        "schedule": trainer.lr_scheduler,
        "scale": trainer._loss_scaler,
        "average": trainer.weight_average,
    }
    return [(name, part) for name, part in parts.items() if part is not None]
