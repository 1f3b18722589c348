"""A group that counts what its ranks send, and compares nothing, as torch's do not."""

from __future__ import annotations

from collections import Counter

import torch

from ctrainer import _C


class Counting:
    """A backend over a group in shared memory, which sees no labels of requests. It
    counts the bytes that its rank gives to each collective."""

    def __init__(self, group: _C.Communicator) -> None:
        self.group, self.sent = group, Counter[str]()
        self.rank, self.world_size = group.rank, group.world_size

    def begin(
        self,
        what: str,
        out: memoryview,
        in_: memoryview,
        dtype: str,
        op: str,
        root: int,
    ) -> Counting:
        kind = torch.uint8 if dtype == "uint8" else getattr(torch, dtype)
        result, given = (
            torch.frombuffer(view, dtype=kind) if len(view) else torch.empty(0)
            for view in (out, in_)
        )  # a barrier has none
        self.sent[what] += given.numel() * given.itemsize
        if what == "all_gather":
            self.group.all_gather(result, given)
        elif what == "all_to_all":
            self.group.all_to_all(result, given)
        elif what == "reduce_scatter":
            self.group.reduce_scatter(result, given, op)
        elif what == "all_reduce":
            self.group.all_reduce(given, op)
        elif what == "broadcast":
            self.group.broadcast(given, root)
        else:
            assert what == "barrier", what
            self.group.barrier()
        return self

    def wait(self) -> None:
        """Everything is done when begin() returns."""
