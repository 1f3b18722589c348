"""Trainer: local steps, synchronized at the ends of blocks."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ctrainer.arguments.bmuf import options_of, way_of
from ctrainer.checkpoint.files import naming

if TYPE_CHECKING:
    from ctrainer.trainer.run import TrainerRun

logger = logging.getLogger("ctrainer.trainer")

FILE = "blocks.pt"


class LocalSteps:
    """Ranks that take local steps through ctrainer.BMUF, to which C reports updates."""

    def make_blocks(self, trainer: TrainerRun) -> None:
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

    def save_blocks(self, trainer: TrainerRun, output_dir: str) -> None:
        if trainer._blocks is None:
            return
        save = trainer._adapter.checkpoints.save_object
        if trainer.args.process_index > 0:
            own = self.own_parts(trainer)
            trainer._checkpoint_files.add_file(
                trainer,
                output_dir,
                lambda sink: save(sink, self.own_file(trainer), own),
            )
        if trainer.args.should_save:
            sink = trainer._checkpoint_files.sink(trainer, output_dir)
            save(sink, FILE, trainer._blocks.blocks_state_dict())
            trainer._checkpoint_files.flush_for_override(trainer, sink, "_save_blocks")

    def load_blocks(self, trainer: TrainerRun, checkpoint: str | None) -> None:
        if checkpoint is None or trainer._blocks is None:
            return
        state = trainer._adapter.checkpoints.load_object(checkpoint, FILE)
        if state is None:
            logger.warning("%s has no %s: a block begins with its weights",
                           checkpoint, FILE)  # fmt: skip
        own = self.read_own_parts(trainer, checkpoint)
        with naming(
            os.path.join(checkpoint, FILE if not own else self.own_file(trainer))
        ):
            blocks = {**(state or {}), **own.get("blocks", {})}
            trainer._blocks.load_blocks_state_dict(blocks)
            if own:
                self.load_own_parts(trainer, own)

    def end_blocks(self, trainer: TrainerRun) -> None:
        """Apply the average that is still pending after the last update."""
        if trainer._blocks is not None:
            trainer._blocks.finish()

    def own_file(self, trainer: TrainerRun) -> str:
        return f"blocks_{trainer.args.process_index}.pt"

    def own_parts(self, trainer: TrainerRun) -> dict[str, Any]:
        """The state that differs between ranks."""
        assert trainer._blocks is not None
        state = {name: part.state_dict() for name, part in self.stateful_parts(trainer)}
        state["blocks"] = trainer._blocks.own_state_dict()
        state["weights"] = trainer._adapter.checkpoints.trained_state(trainer.model)
        return state

    def read_own_parts(self, trainer: TrainerRun, checkpoint: str) -> dict[str, Any]:
        """This rank's own_parts(); {} where the checkpoint has none."""
        if trainer.args.process_index == 0 or not trainer._resumes_ranks:
            return {}
        state = trainer._adapter.checkpoints.load_object(
            checkpoint, self.own_file(trainer)
        )
        if state is None:
            logger.warning(
                "%s has no %s: rank %d continues with the first rank's weights and "
                "optimizer",
                checkpoint, self.own_file(trainer), trainer.args.process_index,
            )  # fmt: skip
        return state or {}

    def load_own_parts(self, trainer: TrainerRun, state: dict[str, Any]) -> None:
        trainer._adapter.checkpoints.load_trained_state(trainer.model, state["weights"])
        for name, part in self.stateful_parts(trainer):
            part.load_state_dict(state[name])

    def stateful_parts(self, trainer: TrainerRun) -> list[tuple[str, Any]]:
        parts = {
            "optimizer": trainer.optimizer,
            "schedule": trainer.lr_scheduler,
            "scale": trainer._loss_scaler,
            "average": trainer.weight_average,
        }
        return [(name, part) for name, part in parts.items() if part is not None]
