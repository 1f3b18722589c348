"""Which ranks share a module's parameters, and which have the same shards."""

from __future__ import annotations

import functools
from typing import Any

from ctrainer import _C, comm

Groups = tuple[_C.Communicator, _C.Communicator | None]


def hybrid_groups(
    ranks_a_group: int, world: _C.Communicator | None = None
) -> tuple[_C.Communicator, _C.Communicator]:
    """The ranks in groups of so many, one after the other: for hybrid sharding.

    world: who is to be divided; by default ctrainer.comm.world(). Returns this rank's
    group, in which parameters are sharded, and its replicas: the ranks that have its
    place in their groups. FSDP takes the pair as process_group; ranks_a_group is best
    the number of ranks on a machine. Collective. Raises ValueError where the ranks
    cannot be divided so.
    """
    world = comm.world() if world is None else world
    if ranks_a_group < 1 or world.world_size % ranks_a_group != 0:
        raise ValueError(
            f"ranks_a_group is {ranks_a_group}; expected a divisor of the "
            f"{world.world_size} ranks"
        )
    shards = world.split(world.rank // ranks_a_group)
    replicas = world.split(world.rank % ranks_a_group)
    assert shards is not None
    assert replicas is not None
    return shards, replicas


def groups_of(
    process_group: Any,
    device_mesh: Any,
    sharding_groups: Any,
    replica_groups: Any,
    rank: int | None,
    world_size: int | None,
) -> Groups:
    """The ranks that share and their replicas, as the constructor's arguments say."""
    given = process_group if device_mesh is None else _of_mesh(device_mesh)
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(
                f"process_group is a tuple of {len(given)}; expected two groups, of "
                "the ranks that share and of those with the same shards"
            )
        return _checked(_adopted(given[0]), _adopted(given[1]))
    shards = _sharing(given, sharding_groups, rank, world_size)
    if replica_groups is None:
        return shards, None
    return _checked(shards, _of_lists(replica_groups))


def _sharing(
    process_group: Any, sharding_groups: Any, rank: int | None, world_size: int | None
) -> _C.Communicator:
    """The ranks that share: those given, this rank's list of ranks, or all."""
    if process_group is not None:
        return _adopted(process_group)
    if sharding_groups is None:
        return comm.world()
    if rank is None or world_size is None:
        raise ValueError(
            "sharding_rank and sharding_world_size must be provided when "
            "sharding_groups is specified"
        )
    found = _of_lists(sharding_groups)
    if (found.rank, found.world_size) != (rank, world_size):
        raise ValueError(
            f"sharding_rank={rank} and sharding_world_size={world_size}, but "
            f"sharding_groups makes this rank {found.rank} of {found.world_size}"
        )
    return found


def _checked(shards: _C.Communicator, replicas: _C.Communicator) -> Groups:
    """All replicas have to have the same place among as many ranks. Collective."""
    own = f"rank {shards.rank} of {shards.world_size}"
    for replica, place in enumerate(replicas.gather_bytes(own.encode())):
        if place.decode() != own:
            raise ValueError(
                f"replica {replica} shares as {place.decode()}, replica "
                f"{replicas.rank} as {own}: they do not have the same shards"
            )
    return shards, replicas


def _of_mesh(mesh: Any) -> Any:
    """Of torch's DeviceMesh: all ranks, or (replicas, ranks that share)."""
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"device_mesh has {mesh.ndim} dimensions; expected 1, or 2 for hybrid "
            "sharding: replicas, and the ranks that share"
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    return mesh.get_group(1), mesh.get_group(0)


def _adopted(group: Any) -> _C.Communicator:
    if isinstance(group, _C.Communicator):
        return group
    from ctrainer.comm import process_group

    return process_group.shared_communicator(group)


def _of_lists(groups: Any) -> _C.Communicator:
    if isinstance(groups, _C.Communicator):
        return groups
    return _own_group(tuple(tuple(group) for group in groups))


@functools.cache
def _own_group(groups: tuple[tuple[int, ...], ...]) -> _C.Communicator:
    """The communicator of the list that this rank is in, one for all units."""
    world = comm.world()
    own = [group for group in groups if world.rank in group]
    if len(own) != 1:
        raise ValueError(
            f"rank {world.rank} must be in exactly one of the lists of ranks {groups}"
        )
    if len(own[0]) == world.world_size:
        return world
    made = world.split(groups.index(own[0]), own[0].index(world.rank))
    assert made is not None
    return made
