"""Process groups, as fairscale's constructors take them."""

from __future__ import annotations

from typing import Any

from ctrainer import _C, comm


def communicator_of(group: Any) -> _C.Communicator:
    """A Communicator, a group of torch.distributed, or None for all ranks."""
    if group is None:
        return comm.world()
    if isinstance(group, _C.Communicator):
        return group
    from ctrainer.comm.process_group import communicator

    return communicator(group)
