"""The ranks that are left when others have died: how they find each other again.

Each rank listens at an address that all know from the beginning. After a failure the
first rank that lives leads: the others connect to it and say how far they are, and it
waits for every rank that is still there. A process that dies loses its connections at
once, a machine within seconds, and a rank that computes keeps its place.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any

from ctrainer import _C
from ctrainer.comm import machines
from ctrainer.runtime.errors import RankFailure

_CONNECT_SECONDS = 3.0
_ROUND_SECONDS = 0.2
_HELLO = ("rank", "progress", "part", "parts", "port")
_LONGEST = 4096  # bytes of what a rank says
_WAITING = 4096  # connections that nobody has accepted yet


@dataclass(frozen=True)
class Rendezvous:
    """The ranks of the new group in its order, by the numbers that they began with."""

    job: str
    members: list[int]
    address: str  # of the first
    port: int  # free there
    progress: int | None  # the most of which all parts are there
    holders: list[int]  # of each part, by the numbers that they began with


class Standby:
    """A rank that can be found after a failure. Its numbers of ranks are those of the
    group that made it, and stay.

    group: every rank of it makes a Standby. reached_by: the address by which others
    reach this machine.
    """

    def __init__(self, group: _C.Communicator, reached_by: str) -> None:
        self.rank = group.rank
        self._listener = socket.create_server((reached_by, 0), backlog=_WAITING)
        own = [*self._listener.getsockname()[:2], machines._this_machine()]
        answers = group.gather_bytes(json.dumps(own).encode())
        self._peers: list[tuple[str, int, str]] = [json.loads(text) for text in answers]

    def close(self) -> None:
        """Count as gone for the others."""
        self._listener.close()

    def machines_of(self, members: list[int]) -> list[str]:
        return [self._peers[rank][2] for rank in members]

    def meet(
        self, progress: int, timeout_seconds: float, part: int = 0, parts: int = 1
    ) -> Rendezvous:
        """Find the ranks that are left. First come those with the most progress of
        which all parts are there; as in any group those of a machine stay together.

        progress: how far this rank is. part: which part of the state it has, of so many
        parts; -1 for none.

        Raises RankFailure for a rank that lives and does not come in time.
        """
        deadline = time.monotonic() + timeout_seconds
        hello = {
            "rank": self.rank, "progress": progress, "part": part, "parts": parts,
            "port": self._free_port(),
        }  # fmt: skip
        for leader in range(self.rank):
            answer = self._follow(leader, hello, deadline)
            if answer is not None:
                return Rendezvous(**answer)
        return self._lead(hello, deadline)

    def _free_port(self) -> int:
        with socket.create_server((self._peers[self.rank][0], 0)) as probe:
            return int(probe.getsockname()[1])

    def _connect(self, rank: int) -> socket.socket | None:
        try:
            made = socket.create_connection(self._peers[rank][:2], _CONNECT_SECONDS)
        except OSError:
            return None
        for option, value in (
            (socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, 3),
        ):  # fmt: skip
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return made

    def _follow(
        self, leader: int, hello: dict[str, int], deadline: float
    ) -> dict[str, Any] | None:
        """What the leader answers; None where it is not there any more."""
        connection = self._connect(leader)
        if connection is None:
            return None
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(json.dumps(hello).encode() + b"\n")
            connection.settimeout(max(deadline - time.monotonic(), _ROUND_SECONDS))
            try:
                line = connection.makefile("rb").readline()
            except TimeoutError:
                raise self._late([leader]) from None
            return json.loads(line) if line.endswith(b"\n") else None
        return None

    def _late(self, ranks: list[int]) -> RankFailure:
        named = ", ".join(f"rank {rank}" for rank in ranks)
        return RankFailure(
            f"rank {self.rank} waits for {named} of those that are left after a "
            "failure, and gives up"
        )

    def _lead(self, hello: dict[str, int], deadline: float) -> Rendezvous:
        with contextlib.ExitStack() as stack:
            return _Leader(self, stack).collect(hello, deadline)


class _Leader:
    """The first rank that is left, while it waits for the others."""

    def __init__(self, standby: Standby, stack: contextlib.ExitStack) -> None:
        self._standby, self._stack = standby, stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        standby._listener.setblocking(False)
        self._selector.register(standby._listener, selectors.EVENT_READ, None)
        self._awaited: set[int] = set()  # that live and have not come
        self._came: dict[int, tuple[dict[str, int], socket.socket]] = {}
        for rank in range(standby.rank + 1, len(standby._peers)):
            connection = standby._connect(rank)
            if connection is not None:
                self._awaited.add(rank)
                self._watch(connection, rank)

    def _watch(self, connection: socket.socket, rank: int | None) -> None:
        self._stack.enter_context(connection)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, [rank, b""])

    def collect(self, own: dict[str, int], deadline: float) -> Rendezvous:
        while self._awaited:
            if time.monotonic() > deadline:
                raise self._standby._late(sorted(self._awaited))
            for key, _ in self._selector.select(_ROUND_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)
        made = self._rendezvous([own, *(said for said, _ in self._came.values())])
        text = json.dumps(vars(made)).encode() + b"\n"
        for _, connection in self._came.values():
            with contextlib.suppress(OSError):  # it has died since
                connection.setblocking(True)
                connection.sendall(text)
        return made

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._watch(self._standby._listener.accept()[0], None)

    def _read(self, connection: Any, known: list[Any]) -> None:
        """known: the rank that the connection leads to, and what it has said."""
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        known[1] += data
        if not data:  # the process has ended
            self._selector.unregister(connection)
            self._awaited.discard(known[0])
            self._came.pop(known[0], None)
        elif known[1].endswith(b"\n") or len(known[1]) > _LONGEST:
            try:
                said = {key: int(json.loads(known[1])[key]) for key in _HELLO}
                range(len(self._standby._peers)).index(said["rank"])
            except (ValueError, TypeError, LookupError):  # another program's
                self._selector.unregister(connection)
                return
            known[:] = said["rank"], b""
            self._awaited.discard(said["rank"])
            self._came[said["rank"]] = said, connection

    def _rendezvous(self, said: list[dict[str, int]]) -> Rendezvous:
        """The ranks in order: those with the whole progress first, with their
        machine's."""
        peers, progress = self._standby._peers, _whole_progress(said)
        ahead = {
            each["rank"]: each["progress"] == progress and each["part"] >= 0
            for each in said
        }
        first_machines = {peers[rank][2] for rank, it_is in ahead.items() if it_is}

        def place(each: dict[str, int]) -> tuple[bool, str, bool, int]:
            machine = peers[each["rank"]][2]
            return (
                machine not in first_machines, machine, not ahead[each["rank"]],
                each["rank"],
            )  # fmt: skip

        order = sorted(said, key=place)
        first, holders = order[0], dict[int, int]()
        for each in order:
            if ahead[each["rank"]]:
                holders.setdefault(each["part"], each["rank"])
        return Rendezvous(
            uuid.uuid4().hex,
            [each["rank"] for each in order],
            peers[first["rank"]][0],
            first["port"],
            progress,
            [holders[part] for part in sorted(holders)],
        )


def _whole_progress(said: list[dict[str, int]]) -> int | None:
    """The most progress of which some rank has each part."""
    parts = dict[int, set[int]]()
    for each in said:
        if each["part"] >= 0:
            parts.setdefault(each["progress"], set()).add(each["part"])
    count = max(each["parts"] for each in said)
    return max((it for it, found in parts.items() if len(found) == count), default=None)
