"""NCCL's collectives on the memory of GPUs, by the plugin ctrainer._cuda."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer import _C
from ctrainer.comm import run
from ctrainer.comm.run import place, world


def communicator(
    over: _C.Communicator | None = None,
    timeout_seconds: float | None = None,
    *,
    stream: int | None = None,
) -> _C.Communicator:
    """A Communicator of the ranks of `over`, a GPU each, on tensors in their memory.

    Every rank calls it. over: through which the ranks find each other, and later
    exchange what hosts decide by; comm.world() by default. timeout_seconds: how long a
    rank waits for the others, here and in each collective, by default as long as in
    those of comm.world(); then, or when NCCL reports a failure, the group is aborted,
    and the RuntimeError names the collective and this rank. stream: the address of a
    CUDA stream of the current device, as torch's `.cuda_stream`. Collectives are
    enqueued behind what is there; by default it is torch's current one on the GPU of
    this rank's number on its machine, which becomes the current device. Tensors and
    arrays in host memory are copied to the GPU and back.

    Raises RuntimeError saying what is missing: the plugin, a driver, a GPU or NCCL.
    """
    cuda = plugin()
    group = world() if over is None else over
    mine = _current_stream() if stream is None else stream
    id = group.broadcast_bytes(_id_or_reason(cuda) if group.rank == 0 else None, 0)
    if len(id) != _ID_BYTES:
        raise RuntimeError(id.decode().rstrip())
    seconds = run.timeout_seconds() if timeout_seconds is None else timeout_seconds
    return _C.plugin_communicator(
        cuda.plugin, id, group.rank, group.world_size, mine, seconds, group
    )


def serve(over: _C.Communicator, device: torch.device) -> None:
    """Have `over` use NCCL for tensors in the memory of the GPU `device`, on a stream
    beside that of the computation. Every rank calls it; nothing is to be done for one
    rank, a group over NCCL, or a second time.

    Raises RuntimeError as communicator(), on all ranks.
    """
    if over.world_size == 1 or over.backend == "nccl" or over.gpu is not None:
        return
    for rank, reason in enumerate(over.gather_bytes(_why_not().encode())):
        if reason:
            raise RuntimeError(f"rank {rank}: {reason.decode()}")
    over.serve_gpu(beside(over, device))


def why_not_served(
    over: _C.Communicator, device: torch.device, backend: str | None
) -> str:
    """serve(), unless the run's backend is another; "", or on all ranks why not."""
    if backend not in (None, "nccl"):
        return f"the backend is {backend!r}, and not nccl"
    try:
        serve(over, device)
    except RuntimeError as error:
        return str(error)
    return ""


def beside(over: _C.Communicator, device: torch.device) -> _C.Communicator:
    """communicator() on a new stream of `device`, beside that of the computation."""
    stream = torch.get_device_module(device).Stream()
    _streams.append(stream)
    return communicator(over, stream=int(stream.cuda_stream))


_streams: list[Any] = []  # as long as the groups, which is as long as the process
_ID_BYTES = 128


def _why_not() -> str:
    try:
        plugin()
    except RuntimeError as error:
        return str(error)
    return ""


def _id_or_reason(cuda: Any) -> bytes:
    """A new group's id; where NCCL cannot make one, why, for all ranks to raise."""
    try:
        return bytes(cuda.comm_id())
    except RuntimeError as error:
        return str(error).encode().ljust(_ID_BYTES + 1)


def plugin() -> Any:
    """ctrainer._cuda; RuntimeError says what is missing."""
    try:
        from ctrainer import _cuda
    except ImportError as error:
        raise RuntimeError(f"NCCL needs ctrainer's CUDA plugin: {error}") from error
    why = _cuda.why_no_device()
    if why is not None:
        raise RuntimeError(f"NCCL needs a GPU, and this process has none: {why}")
    return _cuda


def _current_stream() -> int:
    """torch's, on the GPU that has this rank's number on its machine."""
    torch.cuda.set_device(place().local_rank % torch.cuda.device_count())
    return int(torch.cuda.current_stream().cuda_stream)
