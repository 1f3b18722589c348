"""Process groups, as fairscale's constructors take them."""

from __future__ import annotations

from typing import Any

from ctrainer import _C, comm


def communicator_of(group: Any) -> _C.Communicator:
    """A Communicator, a group of torch.distributed, an object with rank() and size()
    alone, or None for all ranks."""
    if group is None:
        return comm.world()
    if isinstance(group, _C.Communicator):
        return group
    if hasattr(group, "rank") and not hasattr(group, "allgather"):
        return _C.Communicator(None if group.size() == 1 else _Place(group))
    from ctrainer.comm.process_group import communicator

    return communicator(group)


class _Place:
    """A rank among others that cannot be reached: modules can be wrapped there."""

    def __init__(self, group: Any) -> None:
        self.rank, self.world_size = group.rank(), group.size()

    def begin(self, what: str, *args: Any) -> Any:
        """Reject any collective."""
        raise RuntimeError(
            f"{what} on rank {self.rank} of {self.world_size}: process_group has "
            "rank() and size() alone, and no way to the other ranks"
        )
