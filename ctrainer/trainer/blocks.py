"""Trainer: local steps through ctrainer.BMUF, to which C reports updates, synchronized
at the ends of blocks."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ctrainer.arguments.bmuf import options_of, way_of
from ctrainer.checkpoint.files import naming
from ctrainer.trainer.checkpoint import add_object, of_rank, saved_object

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")
FILE = "blocks.pt"


def make_blocks(trainer: TrainerRun) -> None:
    """Make self._blocks if the arguments ask for it and there are several ranks:
    all begin with the first one's parameters."""
    args, group = trainer.args, trainer._communicator
    way = way_of(args)
    trainer._blocks = None
    if way is None or group.world_size == 1:
        return
    from ctrainer.bmuf import BMUF

    if not trainer._inputs_stay:
        from ctrainer.comm import nccl

        reason = nccl.why_not_served(group, args.device, args.ddp_backend)
        if reason:
            logger.warning("the sums of blocks go through the host: %s", reason)
    options = SimpleNamespace(**options_of(args, way))
    look = "nesterov" if way == "use_diloco" else None
    trainer._blocks = BMUF(options, trainer.optimizer, group, look=look)
    trainer._blocks.regroup(group)


def save_blocks(trainer: TrainerRun, output_dir: str) -> None:
    """Save blocks.pt: how many updates the block has, the model that it began with
    and the momentum, with local steps; of every rank but the first, whose own
    are the checkpoint's, blocks_RANK.pt: its weights, its optimizer. Hook."""
    if trainer._blocks is None:
        return
    if trainer.args.process_index > 0:
        name, own = of_rank(trainer, FILE, True), own_parts(trainer)
        add_object(trainer, output_dir, name, own, "_save_blocks")
    if trainer.args.should_save:
        state = trainer._blocks.blocks_state_dict()
        add_object(trainer, output_dir, FILE, state, "_save_blocks")


def load_blocks(trainer: TrainerRun, checkpoint: str | None) -> None:
    """Load blocks.pt, without which a block begins with the weights, and what is
    this rank's own. Hook."""
    if checkpoint is None or trainer._blocks is None:
        return
    state = saved_object(trainer, checkpoint, FILE, "a block begins with its weights")
    own, name, rank = None, of_rank(trainer, FILE, True), trainer.args.process_index
    if rank > 0 and trainer._resumes_ranks:
        without = f"rank {rank} continues with the first rank's weights and optimizer"
        own = saved_object(trainer, checkpoint, name, without)
    with naming(os.path.join(checkpoint, name if own else FILE)):
        blocks = {**(state or {}), **(own or {}).get("blocks", {})}
        trainer._blocks.load_blocks_state_dict(blocks)
        if own:
            files = trainer._adapter.checkpoints
            files.load_trained_state(trainer.model, own["weights"])
            for part_name, part in stateful_parts(trainer):
                part.load_state_dict(own[part_name])


def own_parts(trainer: TrainerRun) -> dict[str, Any]:
    """The state that differs between ranks."""
    assert trainer._blocks is not None
    state = {name: part.state_dict() for name, part in stateful_parts(trainer)}
    state["blocks"] = trainer._blocks.own_state_dict()
    state["weights"] = trainer._adapter.checkpoints.trained_state(trainer.model)
    return state


def stateful_parts(trainer: TrainerRun) -> list[tuple[str, Any]]:
    parts = {
        "optimizer": trainer.optimizer,
        "schedule": trainer.lr_scheduler,
        "scale": trainer._loss_scaler,
        "average": trainer.weight_average,
    }
    return [(name, part) for name, part in parts.items() if part is not None]
