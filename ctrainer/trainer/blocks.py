"""Trainer: ranks that train apart and meet at the ends of blocks."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ctrainer.arguments.bmuf import options_of, way_of
from ctrainer.checkpoint.files import naming
from ctrainer.trainer.checkpoint import CheckpointMixin

if TYPE_CHECKING:
    from ctrainer.bmuf import BMUF

logger = logging.getLogger("ctrainer.trainer")

FILE = "blocks.pt"


class BlocksMixin(CheckpointMixin):
    """Hooks around ctrainer.BMUF, which the loop tells of every update."""

    _blocks: BMUF | None

    def _make_blocks(self) -> None:
        """Make self._blocks if the arguments ask for it and there are several ranks:
        all begin with the first one's parameters."""
        way, group = way_of(self.args), self._communicator
        self._blocks = None
        if way is None or group.world_size == 1:
            return
        from ctrainer.bmuf import BMUF

        look = "nesterov" if way == "use_diloco" else None
        blocks = BMUF(
            SimpleNamespace(**options_of(self.args, way)),
            self.optimizer,
            group,
            look=look,
        )
        blocks.regroup(group)
        self._blocks = blocks

    def _save_blocks(self, output_dir: str) -> None:
        """Save blocks.pt: how many updates the block has, the model that it began with
        and the momentum, if ranks train apart; of every rank but the first, whose own
        are the checkpoint's, blocks_RANK.pt: its weights, its optimizer. Hook."""
        if self._blocks is None:
            return
        save = self._adapter.checkpoints.save_object
        if self.args.process_index > 0:
            own = self._own_parts()
            self._add_file(output_dir, lambda sink: save(sink, self._own_file(), own))
        if self.args.should_save:
            sink = self._sink(output_dir)
            save(sink, FILE, self._blocks.blocks_state_dict())
            self._flush_for_override(sink, "_save_blocks")

    def _load_blocks(self, checkpoint: str | None) -> None:
        """Load blocks.pt, without which a block begins with the weights, and what is
        this rank's own. Hook."""
        if checkpoint is None or self._blocks is None:
            return
        state = self._adapter.checkpoints.load_object(checkpoint, FILE)
        if state is None:
            logger.warning("%s has no %s: a block begins with its weights",
                           checkpoint, FILE)  # fmt: skip
        own = self._read_own_parts(checkpoint)
        with naming(os.path.join(checkpoint, FILE if not own else self._own_file())):
            blocks = {**(state or {}), **own.get("blocks", {})}
            self._blocks.load_blocks_state_dict(blocks)
            if own:
                self._load_own_parts(own)

    def _end_blocks(self) -> None:
        """Take the average that is still on its way after the last update."""
        if self._blocks is not None:
            self._blocks.finish()

    def _own_file(self) -> str:
        return f"blocks_{self.args.process_index}.pt"

    def _own_parts(self) -> dict[str, Any]:
        """What differs between ranks that train apart."""
        assert self._blocks is not None
        state = {name: part.state_dict() for name, part in self._stateful_parts()}
        state["blocks"] = self._blocks.own_state_dict()
        state["weights"] = self._adapter.checkpoints.trained_state(self.model)
        return state

    def _read_own_parts(self, checkpoint: str) -> dict[str, Any]:
        """What _own_parts() gave this rank; {} where that is not in the checkpoint."""
        if self.args.process_index == 0 or not self._resumes_ranks:
            return {}
        state = self._adapter.checkpoints.load_object(checkpoint, self._own_file())
        if state is None:
            logger.warning(
                "%s has no %s: rank %d goes on with the first rank's weights and "
                "optimizer", checkpoint, self._own_file(), self.args.process_index,
            )  # fmt: skip
        return state or {}

    def _load_own_parts(self, state: dict[str, Any]) -> None:
        self._adapter.checkpoints.load_trained_state(self.model, state["weights"])
        for name, part in self._stateful_parts():
            part.load_state_dict(state[name])

    def _stateful_parts(self) -> list[tuple[str, Any]]:
        parts = {
            "optimizer": self.optimizer,
            "schedule": self.lr_scheduler,
            "scale": self._loss_scaler,
            "average": self.weight_average,
        }
        return [(name, part) for name, part in parts.items() if part is not None]
