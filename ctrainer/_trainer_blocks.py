"""Trainer: ranks that train apart and meet at the ends of blocks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ctrainer._block_options import options_of, way_of
from ctrainer._trainer_ckpt import CheckpointMixin

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
        and the momentum, if ranks train apart. Hook."""
        if self._blocks is not None:
            sink, state = self._sink(output_dir), self._blocks.blocks_state_dict()
            self._adapter.checkpoints.save_object(sink, FILE, state)
            self._flush_for_override(sink, "_save_blocks")

    def _load_blocks(self, checkpoint: str | None) -> None:
        """Load blocks.pt; without it a block begins with the weights. Hook."""
        if checkpoint is None or self._blocks is None:
            return
        state = self._adapter.checkpoints.load_object(checkpoint, FILE)
        if state is None:
            logger.warning("%s has no %s: a block begins with its weights",
                           checkpoint, FILE)  # fmt: skip
        self._blocks.load_blocks_state_dict(state or {})
