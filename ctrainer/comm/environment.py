"""The group of processes that a launcher started: torchrun, accelerate, SLURM, mpirun.

Processes of one machine talk through shared memory; machines through MPI or
torch.distributed, which are imported only then.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from ctrainer import _C

DEFAULT_TIMEOUT_SECONDS = 1800.0

MPI = ("Open MPI", "MPICH")
_LOCAL_ADDRESSES = ("localhost", "127.0.0.1", "::1")
# How many groups of the same ranks this process has joined: alike on all of them.
_joined: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class _Launcher:
    """What a launcher calls the rank, the ranks, those of this machine, and the job."""

    name: str
    rank: str
    world_size: str
    local_size: str
    local_rank: str
    job: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_RANK",
        (
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
        ),
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ),
    _Launcher(
        "MPICH",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALNRANKS",
        "MPI_LOCALRANKID",
        ("PMI_PORT",),
    ),
    _Launcher(
        "SLURM",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "",
        "SLURM_LOCALID",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that a launcher started."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int  # among those of this machine
    on_one_machine: bool
    key: str  # of the job: the same on all ranks, and on no other job's

    @property
    def joins_torch(self) -> bool:
        """Whether scripts expect torch.distributed: on several ranks, and under
        torchrun on one, too."""
        return self.world_size > 1 or self.launcher == "torchrun"


def place_of(environ: Mapping[str, str]) -> Place | None:
    """What the launcher says in its variables; None where there is none.

    Raises ValueError for variables that are no numbers or out of range.
    """
    for launcher in _LAUNCHERS:
        if launcher.rank in environ and launcher.world_size in environ:
            return _read(launcher, environ)
    return None


def _read(launcher: _Launcher, environ: Mapping[str, str]) -> Place:
    rank = _number(environ, launcher.rank)
    world_size = _number(environ, launcher.world_size)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{launcher.name} says {launcher.rank}={rank} and "
            f"{launcher.world_size}={world_size}; the rank must be in [0, {world_size})"
        )
    found = [f"{name}={environ[name]}" for name in launcher.job if name in environ]
    # Launchers that say nothing of the job are the parent of all ranks.
    key = " ".join(found or [f"parent={os.getppid()}"])
    local = _is_local(launcher, environ, world_size)
    if launcher.local_rank in environ:
        local_rank = _number(environ, launcher.local_rank)
    else:
        local_rank = rank if local else 0
    return Place(launcher.name, rank, world_size, local_rank, local, key)


def _is_local(launcher: _Launcher, environ: Mapping[str, str], world_size: int) -> bool:
    if launcher.local_size in environ:
        return _number(environ, launcher.local_size) == world_size
    if launcher.name == "SLURM":
        nodes = "SLURM_STEP_NUM_NODES"
        return _number(environ, nodes if nodes in environ else "SLURM_NNODES") == 1
    return environ.get("MASTER_ADDR", "") in _LOCAL_ADDRESSES


def take_place(
    rank: int, machines: Sequence[str], job: str, address: str, port: int
) -> None:
    """Set torchrun's variables, which come before those of other launchers, to this
    place in a new group of ranks, whose machines these are."""
    here = [r for r, machine in enumerate(machines) if machine == machines[rank]]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(machines)),
        LOCAL_RANK=str(here.index(rank)),
        LOCAL_WORLD_SIZE=str(len(here)),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=job,
    )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # it may be gone
    _joined.clear()


def reached_by(place: Place, environ: Mapping[str, str]) -> str:
    """The address by which other ranks of the run reach this machine."""
    if place.on_one_machine:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environ["MASTER_ADDR"], int(environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


def set_local_rendezvous(environ: MutableMapping[str, str]) -> None:
    """Fill in MASTER_ADDR and MASTER_PORT, by which torch.distributed finds the ranks,
    where they are all on this machine and their launcher, mpirun or srun, does not.

    The port, in [20000, 32000), follows from the job: the same on all ranks.
    """
    place = place_of(environ)
    if place is None or place.world_size == 1 or not place.on_one_machine:
        return
    port = 20000 + int(hashlib.sha256(place.key.encode()).hexdigest(), 16) % 12000
    environ.setdefault("MASTER_ADDR", "127.0.0.1")
    environ.setdefault("MASTER_PORT", str(port))


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise ValueError(f"{name} is not set, and the launcher should") from None
    except ValueError:
        raise ValueError(
            f"{name} must be a whole number, got {environ[name]!r}"
        ) from None


def from_environment(
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    environ: Mapping[str, str] | None = None,
    *,
    ranks: Sequence[int] | None = None,
) -> _C.Communicator:
    """Join the processes that the launcher of this one has started, and return their
    group.

    All ranks call it equally often; each call makes a new group. Without a launcher it
    is a group of this process alone; where torch.distributed is initialised without a
    launcher, its default group is used. Ranks of one machine share memory. Those of
    several do so within each, and between them use MPI where mpirun has started them
    and mpi4py is installed, else torch.distributed, initialised with gloo if need be.

    Args:
        timeout_seconds (float, default 1800.0): How long a rank waits
            for others, here and in each collective.
        environ (Mapping[str, str] | None, default None): The launcher's variables;
            None: os.environ.
        ranks (Sequence[int] | None, default None): Only these join, in this order, and
            only they call it; on one machine. None: all.

    Raises:
        RuntimeError: a rank does not come; the message names it.
        ValueError: the launcher's variables make no sense or do not say where the ranks
            find each other.

    Example:
        >>> from ctrainer.comm import from_environment
        >>> group = from_environment()
        >>> group.rank, group.world_size
        (0, 1)
    """
    place = place_of(os.environ if environ is None else environ)
    if place is None:
        return _torch_group() or _C.Communicator()
    members = _members(place, ranks)
    if len(members) == 1:
        return _C.Communicator()
    if place.on_one_machine:
        return _on_one_machine(place, members, timeout_seconds)
    if ranks is not None:
        raise ValueError(
            "ranks of several machines form smaller groups by split(ranks=...) of the "
            "group of all, which every rank calls"
        )
    return _across_machines(place, timeout_seconds)


def _members(place: Place, ranks: Sequence[int] | None) -> tuple[int, ...]:
    everyone = range(place.world_size)
    members = tuple(everyone if ranks is None else ranks)
    if len(set(members)) != len(members) or not set(members) <= set(everyone):
        raise ValueError(
            f"ranks must be different and in [0, {place.world_size}), got {members}"
        )
    if place.rank not in members:
        raise ValueError(f"rank {place.rank} is not among the group's ranks {members}")
    return members


def _on_one_machine(
    place: Place, members: tuple[int, ...], timeout_seconds: float
) -> _C.Communicator:
    job = f"{place.launcher} {place.key} {members} {_joined[members]}"
    _joined[members] += 1
    # Any length becomes one that the socket's name may have.
    key = hashlib.sha256(job.encode()).hexdigest()[:16] + f" of {job}"
    return _C.shared_memory_communicator(
        key.encode()[:255].decode(errors="ignore"),
        members.index(place.rank),
        len(members),
        timeout_seconds,
    )


def has_joined() -> bool:
    """Whether this process has been a rank of any group of several."""
    mpi = sys.modules.get("mpi4py.MPI")
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    return (
        bool(_joined)
        or (dist is not None and dist.is_available() and dist.is_initialized())
        or (mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1)
    )


def torch_place() -> Place | None:
    """This process's place in torch.distributed's default group, if somebody has made
    one; its rank on the machine is what LOCAL_RANK says, or 0."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    dist = torch.distributed
    if not dist.is_initialized():
        return None
    local_rank = _number({"LOCAL_RANK": "0", **os.environ}, "LOCAL_RANK")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return Place("torch.distributed", rank, world_size, local_rank, False, "")


def _torch_group() -> _C.Communicator | None:
    """The default group of torch.distributed, if somebody has made one of several
    ranks: one that is destroyed later takes all over it with it."""
    place = torch_place()
    if place is None or place.world_size == 1:
        return None
    from ctrainer.comm import process_group

    return process_group.communicator()


def _across_machines(place: Place, timeout_seconds: float) -> _C.Communicator:
    from ctrainer.comm import machines

    return machines.over_machines(_engine(place, timeout_seconds), timeout_seconds)


def _engine(place: Place, timeout_seconds: float) -> _C.Communicator:
    """MPI where its launcher has started us and mpi4py is there; else torch."""
    if place.launcher in MPI and importlib.util.find_spec("mpi4py") is not None:
        from ctrainer.comm import mpi

        return mpi.communicator(timeout_seconds=timeout_seconds)
    from ctrainer.comm import process_group, processes

    if not processes.is_initialized():
        address, port = (os.environ.get(n) for n in ("MASTER_ADDR", "MASTER_PORT"))
        if not address or not port:
            raise ValueError(
                f"{place.launcher} started {place.world_size} ranks on several "
                "machines: set MASTER_ADDR and MASTER_PORT to where rank 0 can be "
                "reached, on every rank"
            )
        where = f"tcp://{address}:{port}"
        processes.join("gloo", where, place.rank, place.world_size, timeout_seconds)
    return process_group.communicator()
