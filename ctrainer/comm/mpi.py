"""mpi4py's communicators as the backend of a Communicator."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from typing import Any

import mpi4py
import numpy as np

from ctrainer import _C
from ctrainer.runtime.fork import by_parent_alone

# mpi4py ends MPI in every process that exits, in a forked child too, which ends it for
# its parent. Where nobody has settled the question yet, the parent alone does so.
_ends_mpi = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None
if _ends_mpi:
    mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

DEFAULT_TIMEOUT_SECONDS = 1800.0

_DTYPES = {
    "float64": MPI.DOUBLE,
    "float32": MPI.FLOAT,
    "int64": MPI.INT64_T,
    "int32": MPI.INT32_T,
    "int16": MPI.INT16_T,
    "int8": MPI.INT8_T,
    "uint8": MPI.UINT8_T,
    "bool": MPI.C_BOOL,
}
_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_OPS_OF_BOOLS = {"sum": MPI.LOR, "mean": MPI.LAND, "max": MPI.LOR, "min": MPI.LAND}
_NAP_SECONDS = 50e-6  # between two looks at a collective that takes long
_LOOKS = 200  # before the first nap


def communicator(
    comm: Any = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> _C.Communicator:
    """A Communicator over an mpi4py communicator; None: MPI.COMM_WORLD.

    It works on a duplicate, so messages of others never meet its own; every rank of
    comm calls this. timeout_seconds: how long a collective may take.
    """
    if not (timeout_seconds > 0):
        raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}")
    whole = MPI.COMM_WORLD if comm is None else comm
    return _C.Communicator(MPIBackend(whole.Dup(), timeout_seconds))


class MPIBackend:
    """Collectives of an mpi4py communicator on buffers in host memory.

    MPI has no bf16 and fp16 floats: they are reduced in float32 and rounded once.
    """

    def __init__(self, comm: Any, timeout_seconds: float) -> None:
        self.comm = comm
        self.timeout_seconds = timeout_seconds
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()

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
        if what in ("all_reduce", "reduce", "reduce_scatter"):
            return self._reduce(what, out, in_, dtype, op, root)
        given, taken = [in_, MPI.BYTE], [out, MPI.BYTE]
        if what == "all_gather":
            return self._pending(self.comm.Iallgather(given, taken))
        if what == "all_to_all":
            return self._pending(self.comm.Ialltoall(given, taken))
        if what == "broadcast":
            return self._pending(self.comm.Ibcast(given, root))
        return self._pending(self.comm.Ibarrier())

    def make_group(self, ranks: list[int]) -> MPIBackend:
        """A smaller group, made by these ranks alone, with this one's time-out."""
        of_ranks = self.comm.Get_group().Incl(ranks)
        return MPIBackend(self.comm.Create_group(of_ranks), self.timeout_seconds)

    def _reduce(
        self,
        what: str,
        out: memoryview,
        in_: memoryview,
        dtype: str,
        op: str,
        root: int,
    ) -> Pending:
        given = _Array(in_, dtype)
        result = _Array(out, dtype) if what == "reduce_scatter" else given
        kind = _DTYPES[given.dtype]
        by = (_OPS_OF_BOOLS if dtype == "bool" else _OPS)[op]
        if what == "all_reduce":
            request = self.comm.Iallreduce(MPI.IN_PLACE, [given.values, kind], by)
        elif what == "reduce":
            here = [given.values, kind]
            sent, taken = (MPI.IN_PLACE, here) if root == self.rank else (here, None)
            request = self.comm.Ireduce(sent, taken, by, root)
        else:
            request = self.comm.Ireduce_scatter_block(
                [given.values, kind], [result.values, kind], by
            )
        divisor = self.world_size if op == "mean" and dtype != "bool" else 1
        return self._pending(request, lambda: result.finish(divisor), given)

    def _pending(
        self, request: Any, finish: Callable[[], None] | None = None, *kept: object
    ) -> Pending:
        return Pending(request, self.timeout_seconds, finish, kept)


class _Array:
    """A buffer as MPI can reduce it: of bf16 and fp16 floats, a copy in float32."""

    def __init__(self, view: memoryview, dtype: str) -> None:
        self.stored = dtype
        self.dtype = "float32" if dtype in ("bfloat16", "float16") else dtype
        kind = {"bfloat16": "uint16"}.get(dtype, dtype)
        self.home = np.frombuffer(view, kind)
        if dtype == "bfloat16":
            self.values = (self.home.astype(np.uint32) << 16).view(np.float32)
        elif dtype == "float16":
            self.values = self.home.astype(np.float32)
        else:
            self.values = self.home

    def finish(self, divisor: int) -> None:
        """Make a mean of a sum, and bring it home."""
        if divisor > 1 and self.values.dtype.kind == "f":
            self.values /= divisor
        elif divisor > 1:  # towards zero, as the other backends do
            self.values[:] = np.sign(self.values) * (np.abs(self.values) // divisor)
        if self.stored == "bfloat16":
            self.home[:] = _bfloat16(self.values)
        elif self.stored == "float16":
            with np.errstate(over="ignore"):
                self.home[:] = self.values


def _bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper halves of floats, rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


class Pending:
    """A collective under way, and what has to live as long."""

    def __init__(
        self,
        request: Any,
        timeout_seconds: float,
        finish: Callable[[], None] | None,
        kept: tuple[object, ...],
    ) -> None:
        self._request, self._finish, self._kept = request, finish, kept
        self._timeout_seconds = timeout_seconds

    def wait(self) -> None:
        """Wait for the result; RuntimeError when it does not come in time."""
        if not _has_ended(self._request, self._timeout_seconds):
            _abandon(self)
            raise RuntimeError(
                "another rank did not come, or was not done, within "
                f"{self._timeout_seconds:g} seconds"
            )
        if self._finish is not None:
            self._finish()

    def ends_late(self) -> bool:
        """Whether an abandoned one ends within its time-out, from now on."""
        return _has_ended(self._request, self._timeout_seconds)


def _end_mpi() -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


if _ends_mpi:
    atexit.register(by_parent_alone(_end_mpi))


def _has_ended(request: Any, timeout_seconds: float) -> bool:
    until = time.monotonic() + timeout_seconds
    looks = 0
    while not request.Test():
        looks += 1
        if looks > _LOOKS:
            if time.monotonic() > until:
                return False
            time.sleep(_NAP_SECONDS)
    return True


# What was given up: MPI may still write into its buffers.
_abandoned: list[Pending] = []


def _abandon(pending: Pending) -> None:
    if not _abandoned:
        atexit.register(by_parent_alone(_end_job))
    _abandoned.append(pending)


def _end_job() -> None:
    """At exit MPI would wait for ever for ranks that still owe a collective; if they do
    not come now, end them all, as MPI does where a rank dies."""
    if not all(pending.ends_late() for pending in _abandoned):
        MPI.COMM_WORLD.Abort(1)
