"""The group of the run: all processes of the launcher, joined once a process."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any

from ctrainer import _C
from ctrainer.comm import environment
from ctrainer.comm.environment import (
    DEFAULT_TIMEOUT_SECONDS,
    MPI,
    Place,
    from_environment,
    place_of,
    reached_by,
    take_place,
    torch_place,
)
from ctrainer.comm.survivors import Standby
from ctrainer.runtime.fork import keep_torch_groups

_joined: list[_C.Communicator] = []  # the group of the run, or nothing
_seconds = [DEFAULT_TIMEOUT_SECONDS]  # how long its ranks wait for each other
_standby: list[Standby] = []  # from stand_by() on
_members: list[int] = []  # of the run's group, by the numbers that they began with
_is_child: list[int] = []  # this process, if it was forked off one that had joined


def world(timeout_seconds: float | None = None) -> _C.Communicator:
    """Return the group of all processes of the run, which every part of ctrainer
    shares.

    The first call joins it, as from_environment() does, and all ranks have to make it;
    later ones return the same group, or join anew where it has been closed. Without a
    launcher, as long as torch.distributed has no ranks either, and in a process forked
    off a rank, such as a worker of a data loader, it is a group of one.

    Args:
        timeout_seconds (float | None, default None): How long the ranks wait for each
            other where this call joins; None: 1800.

    Raises:
        RuntimeError, ValueError: as from_environment().

    Example:
        >>> from ctrainer.comm import world
        >>> world().world_size
        1
    """
    for group in _joined:
        if is_open(group) and (group.world_size > 1 or place().world_size == 1):
            return group
    group = _C.Communicator() if _is_child else _join(timeout_seconds)
    _joined[:] = [group]
    return group


def place() -> Place:
    """Where this process stands in the run, by its launcher or torch.distributed;
    joins nothing."""
    alone = Place("", 0, 1, 0, True, "")
    if _is_child:
        return alone
    return place_of(os.environ) or torch_place() or alone


def leave() -> None:
    """Close the group of the run, if this process has joined it: the collectives that
    others wait in then fail, and the next world() joins anew."""
    while _joined:
        group = _joined.pop()
        if is_open(group) and group.world_size > 1:
            group.close()


def stand_by() -> None:
    """Let this rank be found by the others when some have died, for regroup(). All
    ranks call it, before each part of the run in which some may die.

    Raises:
        ValueError: there is no launcher, or it is mpirun, which ends all ranks.
    """
    if _standby or place().world_size == 1:
        return
    own = place_of(os.environ)
    if own is None or own.launcher in MPI:
        raise ValueError(
            "ranks outlive others only under a launcher that lets them, such as "
            f"torchrun on each machine; here it is {own.launcher if own else 'none'}"
        )
    group = world()
    _members[:] = range(group.world_size)
    _standby.append(Standby(group, reached_by(own, os.environ)))


def stands_by() -> bool:
    """Whether stand_by() has been called, and end_standby() not since."""
    return bool(_standby)


def end_standby() -> None:
    """Undo stand_by(): regroup() of the others does not wait for this rank."""
    while _standby:
        _standby.pop().close()


@dataclass(frozen=True)
class Regrouped:
    """The ranks after some have died.

    lost: the ranks that are, by their numbers in the group that is left. progress: how
    far ranks are that have all parts of the state together; None where parts are lost.
    saves: this rank is the one that gives its part of it to all.
    """

    lost: list[int]
    progress: int | None
    saves: bool


def regroup(progress: int, part: int = 0, parts: int = 1) -> Regrouped:
    """Leave the group of the run, in which ranks have failed, and take a place among
    those that are left; the next world() joins them.

    Every rank that is left calls it, after stand_by() while all were there. A rank
    with the most progress of which all parts are there becomes the first; RANK,
    WORLD_SIZE and the launcher's other variables become those of the new group.

    Args:
        progress (int): How far this rank is, such as its updates.
        part (int, default 0): Which part of the state this rank has; -1: none.
        parts (int, default 1): How many there are; 1: each rank has the whole state.

    Raises:
        RankFailure: a rank that is there does not come within the time-out.
    """
    leave()
    (standby,) = _standby
    met = standby.meet(progress, timeout_seconds(), part, parts)
    rank, machines = met.members.index(standby.rank), standby.machines_of(met.members)
    take_place(rank, machines, met.job, met.address, met.port)
    lost = [old for old, began in enumerate(_members) if began not in met.members]
    _members[:] = met.members
    return Regrouped(lost, met.progress, standby.rank in met.holders)


def has_lost_ranks() -> bool:
    """Whether the run continues with fewer ranks than it began with."""
    return bool(_standby) and len(_members) < len(_standby[0]._peers)


def unpickled(message: bytes, rank: int) -> Any:
    """The object in a message of rank `rank`, which pickle has made.

    Batches are sent pickled, since a collator may put objects of any class in them.
    Reading them runs no code that the run does not trust in any case: the message comes
    from a process of the same run, with the same script and user, over the group's own
    collectives, and never from a file or anybody outside the group.

    Raises:
        ValueError: the message cannot be read.
    """
    try:
        return pickle.loads(message)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"the message of rank {rank} cannot be read: {error}"
        ) from error


def _join(timeout_seconds: float | None) -> _C.Communicator:
    _seconds[:] = [
        DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    ]
    return from_environment(_seconds[0])


def timeout_seconds() -> float:
    """How long the ranks of the run wait for each other; 1800 where none has joined."""
    return _seconds[0]


def is_open(group: _C.Communicator) -> bool:
    """Whether nobody has closed it."""
    try:
        return group.world_size > 0
    except ValueError:  # closed
        return False


def _after_fork() -> None:
    keep_torch_groups()
    _standby.clear()  # which closes its socket: the child's may outlive this rank
    was_rank = any(is_open(group) and group.world_size > 1 for group in _joined)
    _joined.clear()
    if was_rank or _is_child or environment.has_joined():
        _is_child[:] = [os.getpid()]


os.register_at_fork(after_in_child=_after_fork)
