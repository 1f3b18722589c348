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
    name = _this_machine() if machine is None else machine
    names = [text.decode() for text in whole.gather_bytes(name.encode())]
    machines = list(dict.fromkeys(names))
    per_machine = len(names) // len(machines)
    in_order = [name for name in machines for _ in range(per_machine)]
    if per_machine == 1 or names != in_order:
        return whole
    index, place = divmod(whole.rank, per_machine)
    job = whole.broadcast_bytes(uuid.uuid4().hex.encode()).decode()
    inner = _C.shared_memory_communicator(
        f"{job} machine {index}", place, per_machine, timeout_seconds
    )
    if len(machines) == 1:
        whole.close()
        return inner
    outer = whole.split(place, index)
    assert outer is not None  # a color was given
    return _C.two_level_communicator(inner, outer, whole)


def _this_machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
