"""torch.distributed: joining the default group, leaving it, starting processes."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ctrainer.comm import run
from ctrainer.comm.environment import set_local_rendezvous
from ctrainer.runtime.errors import RankFailure
from ctrainer.runtime.fork import by_parent_alone

DEFAULT_TIMEOUT_SECONDS = 1800.0
_SOON_SECONDS = 10.0


def available() -> bool:
    return dist.is_available()


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def join(
    backend: str, init_method: str, rank: int, world_size: int, timeout_seconds: float
) -> int:
    """Join the default group unless this process has; return this process's rank.

    A group that is made here is left at the end of the process. After a failure of
    ranks, of which more may follow, RankFailure is raised for one that does not come
    soon.
    """
    if is_initialized():
        return dist.get_rank()
    limit, others_failed = timedelta(seconds=timeout_seconds), run.has_lost_ranks()
    soon = min(limit, timedelta(seconds=_SOON_SECONDS)) if others_failed else limit
    try:
        dist.init_process_group(backend, init_method, soon, world_size, rank)
    except RuntimeError as error:
        if others_failed:
            raise RankFailure(f"joining torch.distributed again: {error}") from error
        raise
    if soon < limit:
        dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    leave_at_exit()
    return dist.get_rank()


def join_run(wanted: str | None, usual: str, timeout_seconds: float) -> None:
    """Join the ranks of the run as the default group, for the collectives of scripts,
    by the backend that is wanted, or the usual one if torch has it.

    Nothing where there is a group, or where nothing says where ranks of several
    machines meet: MASTER_ADDR and MASTER_PORT. Raises ValueError for a wanted backend
    that torch lacks.
    """
    place = run.place()
    if not place.joins_torch or not available() or is_initialized():
        return
    backend = wanted or usual
    if ":" not in backend and not dist.is_backend_available(backend):
        if wanted is None:
            return
        raise ValueError(
            f"ddp_backend={wanted!r}, which this torch does not have; leave it out for "
            f"{usual}"
        )
    set_local_rendezvous(os.environ)
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        join(backend, "env://", place.rank, place.world_size, timeout_seconds)


def leave() -> None:
    """Leave the default group; nothing where there is none."""
    if is_initialized():
        dist.destroy_process_group()


def leave_at_exit() -> None:
    """Leave the default group while Python still runs: one of gloo's threads that
    releases a collective's tensor after it ends the process by an abort."""
    atexit.register(by_parent_alone(leave))


def wait_for_all() -> None:
    """Wait until every process of the default group has come here."""
    dist.barrier()


def backend_for(wanted: str, on_gpus: bool) -> str:
    """`wanted`, or gloo where it is nccl and the tensors are in host memory."""
    return "gloo" if wanted == "nccl" and not on_gpus else wanted


def use_gpu(index: int) -> None:
    torch.cuda.set_device(index)


def gpus() -> int:
    return torch.cuda.device_count()


def world_size() -> int:
    return dist.get_world_size()


def rank() -> int:
    return dist.get_rank()


def default_group() -> Any:
    """The default process group, or None where torch.distributed has none."""
    return dist.group.WORLD if is_initialized() else None


def start(function: Callable[..., Any], args: tuple[Any, ...], n: int) -> None:
    """Run function(i, *args) in n new processes and wait for them.

    When one fails the others are ended and its exception is raised here.
    """
    spawn(function, args=args, nprocs=n, join=True)  # type: ignore[no-untyped-call]
