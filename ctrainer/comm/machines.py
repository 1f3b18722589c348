"""Groups across machines: shared memory within each, an engine between them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from ctrainer import _C


def over_machines(
    whole: _C.Communicator, timeout_seconds: float, machine: str | None = None
) -> _C.Communicator:
    """A group of the ranks of `whole` that talk through shared memory where they can.

    machine: what names this rank's machine, the same text on all its ranks and another
    on the others; None: the system's boot and network name space. Every rank calls it;
    it takes `whole` over. Where machines have different numbers of ranks, or ranks are
    not numbered machine by machine, or each has a machine to itself, it returns `whole`
    as it is.
    """
    per_machine = ranks_a_machine(whole, machine)
    if per_machine in (None, 1):
        return whole
    assert per_machine is not None
    index, place = divmod(whole.rank, per_machine)
    job = whole.broadcast_bytes(uuid.uuid4().hex.encode()).decode()
    inner = _C.shared_memory_communicator(
        f"{job} machine {index}", place, per_machine, timeout_seconds
    )
    if per_machine == whole.world_size:
        whole.close()
        return inner
    outer = whole.split(place, index)
    assert outer is not None  # a color was given
    return _C.hierarchical_communicator(inner, outer, whole)


def ranks_a_machine(whole: _C.Communicator, machine: str | None = None) -> int | None:
    """How many ranks of `whole` each machine has; None where machines have different
    numbers of them, or they are not numbered machine by machine. Collective."""
    name = _this_machine() if machine is None else machine
    names = [text.decode() for text in whole.gather_bytes(name.encode())]
    machines = list(dict.fromkeys(names))
    each = len(names) // len(machines)
    in_order = [name for name in machines for _ in range(each)]
    return each if names == in_order else None


def _this_machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
