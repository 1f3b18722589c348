"""torch's process groups as the backend of a Communicator."""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from ctrainer import _C
from ctrainer.comm import calls
from ctrainer.comm.run import is_open

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards: gloo has no mean of its own
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_OF_BOOLS = {"sum": "max", "mean": "min"}  # any and all
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_GPU = torch.device("cuda")

# Newer releases call them so, and warn about the older names.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


# The threads of a group may hold a collective's tensors a moment longer than it takes.
# A tensor that such a thread is the last to hold needs the interpreter to go, and once
# that is ending, the thread brings the process down: SIGABRT, "terminate called without
# an active exception". So tensors stay here until no thread has them.
_held: list[Any] = []  # tensors; torch has no type for how many hold one
_guard = threading.Lock()
_EXIT_SECONDS = 5.0


def _hold(*tensors: torch.Tensor) -> None:
    with _guard:
        _held[:] = [each for each in _held if each._use_count() > 1]
        _held.extend(tensors)


@atexit.register
def _wait_for_threads() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    while any(each._use_count() > 1 for each in _held) and time.monotonic() < end:
        time.sleep(1e-3)


def communicator(group: Any = None) -> _C.Communicator:
    """A Communicator over a process group; None: the default group.

    Raises ValueError where torch.distributed is not initialised.
    """
    _check_initialized()
    return _C.Communicator(ProcessGroupBackend(group))


class _Shared(_C.Communicator):
    """One that can be found again for as long as somebody has it."""


_shared: WeakValueDictionary[Any, _Shared] = WeakValueDictionary()


def shared_communicator(group: Any = None) -> _C.Communicator:
    """The Communicator over a process group that all parts of a run have: it compares
    what they do. Raises as communicator() does."""
    _check_initialized()
    key = dist.group.WORLD if group is None else group
    found = _shared.get(key)
    if found is None or not is_open(found):
        found = _shared[key] = _Shared(ProcessGroupBackend(key))
    return found


def rank() -> int:
    """This process's rank in the default group; raises as communicator() does."""
    _check_initialized()
    return dist.get_rank()


def world_size() -> int:
    """The processes of the default group; raises as communicator() does."""
    _check_initialized()
    return dist.get_world_size()


def _check_initialized() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "torch.distributed is not initialised: call "
            "torch.distributed.init_process_group(), or "
            "ctrainer.fairseq.distributed.distributed_init(), before a group is used"
        )


class ProcessGroupBackend:
    """Collectives of a process group on buffers in host memory. Time-outs are the
    group's own.

    A group of NCCL works on GPUs alone, behind all that is enqueued there: gloo
    connects the same ranks beside it, so that no host waits for its GPU. To make the
    backend is then a collective.
    """

    def __init__(self, group: Any = None) -> None:
        given: Any = dist.group.WORLD if group is None else group
        self.group = _by_gloo(given) if dist.get_backend(given) == "nccl" else given
        self.rank: int = dist.get_rank(self.group)
        self.world_size: int = dist.get_world_size(self.group)
        self._on_gloo = dist.get_backend(self.group) == "gloo"

    def note_request(self, request: bytes) -> None:
        """Note a collective before it begins, for ranks that wait for each other."""
        if self._on_gloo:
            calls.of_group(self.group).note(request)

    def begin(
        self,
        what: str,
        out: memoryview,
        in_: memoryview,
        dtype: str,
        op: str,
        root: int,
    ) -> Pending:
        """Start a collective by its name in core/comm/comm.h; wait() ends it."""
        source, result = (self._tensor(view, dtype) for view in (in_, out))
        if dtype == "bool":
            op = _OF_BOOLS.get(op, op)
        more: dict[str, Any] = {"group": self.group, "async_op": True}
        written = source if what in _IN_PLACE else result
        home = written
        if what == "all_reduce":
            work = dist.all_reduce(source, _OPS[op], **more)
        elif what == "broadcast":
            work = dist.broadcast(
                source, dist.get_global_rank(self.group, root), **more
            )
        elif what == "reduce":
            work = dist.reduce(
                source, dist.get_global_rank(self.group, root), _OPS[op], **more
            )
        elif what == "all_gather":
            work = _all_gather(result, source, **more)
        elif what == "reduce_scatter" and self._on_gloo:
            # As gloo makes it, in work that no time ends before the group's.
            source = source.clone()
            work = dist.all_reduce(source, _OPS[op], **more)
            written = source.view(self.world_size, -1)[self.rank]
        elif what == "reduce_scatter":
            work = _reduce_scatter(result, source, _OPS[op], **more)
        elif what == "all_to_all":
            work = dist.all_to_all_single(result, source, **more)
        else:
            work = dist.barrier(**more)
        _hold(result, source)
        divisor = self.world_size if op == "mean" else 1
        return Pending(
            work, written, home, divisor, self.group if self._on_gloo else None
        )

    def make_group(self, ranks: list[int]) -> ProcessGroupBackend:
        """A smaller group, made by these ranks alone, with this one's time-out."""
        members = [dist.get_global_rank(self.group, rank) for rank in ranks]
        timeout = self.group._get_backend(torch.device("cpu")).options._timeout
        backend = dist.get_backend(self.group)
        return ProcessGroupBackend(_new_group(members, timeout, backend))

    @staticmethod
    def _tensor(view: memoryview, dtype: str) -> torch.Tensor:
        kind = torch.uint8 if dtype == "bool" else getattr(torch, dtype)
        if view.nbytes == 0:
            return torch.empty(0, dtype=kind, device="cpu")
        return torch.frombuffer(view, dtype=kind)


def _by_gloo(group: Any) -> Any:
    ranks = dist.get_process_group_ranks(group)
    timeout = group._get_backend(_GPU).options._timeout
    try:
        return _new_group(ranks, timeout, "gloo")
    except RuntimeError as error:
        raise RuntimeError(
            f"gloo does not connect the hosts beside a process group of NCCL: {error}. "
            "Set GLOO_SOCKET_IFNAME to the network interface between them"
        ) from error


def _new_group(ranks: list[int], timeout: Any, backend: str) -> Any:
    """A process group of these ranks, which alone make it."""
    more: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    return dist.new_group(
        ranks, timeout=timeout, backend=backend, use_local_synchronization=True, **more
    )


class Pending:
    """A collective under way; compared: the group, where its ranks' calls are."""

    def __init__(
        self,
        work: Any,
        written: torch.Tensor,
        home: torch.Tensor,
        divisor: int,
        compared: Any,
    ) -> None:
        self._work, self._written, self._home = work, written, home
        self._divisor, self._compared = divisor, compared

    def wait(self) -> None:
        """Wait for the result, make a mean of a sum, and bring it home."""
        if self._work is not None and self._compared is not None:
            calls.wait(self._work, self._compared)
        elif self._work is not None:
            self._work.wait()
        if self._divisor > 1:
            whole = not self._written.is_floating_point()
            self._written.div_(self._divisor, rounding_mode="trunc" if whole else None)
        if self._home is not self._written:
            self._home.copy_(self._written)
