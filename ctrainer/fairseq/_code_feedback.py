"""What codes have missed of gradients, in fairseq's checkpoints."""

from __future__ import annotations

import logging
from typing import Any

from ctrainer.adapters import torch_fairseq as tools

logger = logging.getLogger("ctrainer.fairseq.trainer")

KEY = "code_feedback"  # of extra_state: a list with what each process has missed


def collect(module: Any, own: bool) -> list[Any]:
    """By process, on the first; with `own` this process's alone. Collective, then not.

    As large as the gradients of the whole model, in float32, for each process.
    """
    state = module.feedback_state_dict()
    if own:
        return [state]
    group, mine = module.communicator, tools.to_bytes(state)
    found = []
    for rank in range(group.world_size):
        data = group.broadcast_bytes(mine if rank == group.rank else None, rank)
        if group.rank == 0:
            found.append(tools.from_bytes(data, "what codes have missed"))
    return found


def load(module: Any, extra_state: dict[str, Any], filename: str, own: bool) -> None:
    """Go on with what collect() gave, of as many processes; else from nothing, with a
    warning."""
    saved = extra_state.get(KEY) or []
    expected = 1 if own else module.world_size
    if len(saved) != expected:
        logger.warning(
            "%s has what codes have missed of %d processes, and these are %d: it "
            "begins with nothing",
            filename,
            len(saved),
            expected,
        )
        return
    module.load_feedback_state_dict(saved[0 if own else module.rank])
