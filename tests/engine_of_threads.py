"""A group of threads whose engine compares nothing, as torch's do not."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer import _C


class Engine:
    """A backend over a group in shared memory, which sees no labels of requests."""

    def __init__(self, group: _C.Communicator) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size

    def begin(
        self,
        what: str,
        out: memoryview,
        in_: memoryview,
        dtype: str,
        op: str,
        root: int,
    ) -> Engine:
        given, result = (_tensor(view, dtype) for view in (in_, out))
        call: Any = getattr(self.group, what)
        if what == "all_reduce":
            call(given, op)
        elif what == "all_gather":
            call(result, given)
        elif what == "reduce_scatter":
            call(result, given, op)
        elif what == "broadcast":
            call(given, root)
        else:
            assert what == "barrier", what
            call()
        return self

    def wait(self) -> None:
        """It has ended."""


def _tensor(view: memoryview, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return (
        torch.frombuffer(view, dtype=kind)
        if view.nbytes
        else torch.empty(0, dtype=kind)
    )
