"""What each worker has of its own between the ends of blocks, in fairseq's checkpoints.

With BMUF and SlowMo every worker updates a model of its own. The file holds the first
one's where fairseq has the model and the optimizer's state, and the others' beside it.
"""

from __future__ import annotations

import logging
from typing import Any

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools

logger = logging.getLogger("ctrainer.fairseq.trainer")

KEY = "workers"  # of extra_state: by rank, None for the first
_PARTS = ("model", "criterion", "last_optimizer_state")
_AVERAGES = ("ema", "ema_fp32_params")
_BLOCKS = "bmuf"  # in the optimizer's state
# Of a block's state: what all workers have alike.
_ALIKE = ("num_updates", "model", "momentum")

State = dict[str, Any]


def own_part(state: State) -> State:
    """What of a checkpoint's dictionary is this worker's alone."""
    own = {name: state[name] for name in _PARTS}
    optimizer = state["last_optimizer_state"]
    if _BLOCKS in optimizer:
        blocks = {k: v for k, v in optimizer[_BLOCKS].items() if k not in _ALIKE}
        own["last_optimizer_state"] = {**optimizer, _BLOCKS: blocks}
    extra = state["extra_state"]
    return {**own, **{name: extra[name] for name in _AVERAGES if name in extra}}


def collect(group: _C.Communicator, mine: State) -> list[State | None]:
    """What own_part() gave on each worker, on the first; all call this.

    One worker after the other sends, so that no more than one is in memory twice.
    """
    found: list[State | None] = [None]
    for rank in range(1, group.world_size):
        data = tools.to_bytes(mine) if rank == group.rank else None
        sent = group.broadcast_bytes(data, rank)
        if group.rank == 0:
            found.append(tools.from_bytes(sent, f"what worker {rank} has of its own"))
    return found


def take_own(state: State, rank: int, workers: int, filename: str) -> State:
    """A checkpoint's dictionary with this worker's part in the place of the first's.

    Raises ValueError where another number of workers wrote it.
    """
    extra = state["extra_state"]
    saved = extra.get(KEY)
    if saved is None and workers == 1:
        return state
    if saved is None:
        logger.warning(
            "%s has the first worker's state alone, which all go on from: call "
            "consolidate_optimizer() on all workers before save_checkpoint()",
            filename,
        )
        return state
    if len(saved) != workers:
        raise ValueError(
            f"{filename} was written by {len(saved)} workers with models of their own, "
            f"and these are {workers}: run as many, or begin a block with the "
            "first worker's model (--reset-optimizer)"
        )
    own = saved[rank]
    if own is None:
        return state
    parts = {name: own[name] for name in _PARTS}
    optimizer = own["last_optimizer_state"]
    if _BLOCKS in optimizer:
        shared = state["last_optimizer_state"][_BLOCKS]
        alike = {k: v for k, v in shared.items() if k in _ALIKE}
        blocks = {**alike, **optimizer[_BLOCKS]}
        parts["last_optimizer_state"] = {**optimizer, _BLOCKS: blocks}
    averages = {name: own[name] for name in _AVERAGES if name in own}
    return {**state, **parts, "extra_state": {**extra, **averages}}
