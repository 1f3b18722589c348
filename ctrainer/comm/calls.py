"""The collectives that ranks of a torch group have called, compared when one does not
end: torch's groups compare nothing, and wait up to their time-outs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter, deque
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist

from ctrainer import _C

PATIENCE_SECONDS = 2.0
STALL_SECONDS = float(os.environ.get("CTRAINER_STALL_SECONDS", "180"))  # as in _C
_STORE_SECONDS = 5.0
_KEPT = 256  # calls, of about 200 bytes
_CRC = 4  # bytes
_made: Counter[str] = Counter()


class Calls:
    """The calls of this rank in one group, all of them in a CRC, the last by name."""

    def __init__(self, group: Any) -> None:
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._store = group.get_group_store()
        self._last: deque[bytes] = deque(maxlen=_KEPT)
        self._n = self._crc = 0
        # A store may still have what was written in an earlier group of this name.
        _made[group.group_name] += 1
        self._prefix = f"ctrainer/{group.group_name}/{_made[group.group_name]}"

    def note(self, request: bytes) -> None:
        """Note a call: the bytes that a backend's note_request() gets."""
        self._crc = crc32(request, self._crc)
        self._last.append(self._crc.to_bytes(_CRC) + request)
        self._n += 1

    def _keys(self, what: str) -> list[str]:
        return [f"{self._prefix}/{what}/{rank}" for rank in range(self._world_size)]

    def compare(self) -> None:
        """Raise the ValueError of the first call in which ranks differ.

        Does nothing until all ranks have come here. What a rank has called stays
        true, so it does not matter when it came.
        """
        if not self._last:
            return
        keys = self._keys("calls")
        first = self._n - len(self._last)
        stored = first.to_bytes(8) + b"".join(self._last)
        try:
            self._store.set(keys[self._rank], stored)
            found = (
                [self._store.get(k) for k in keys] if self._store.check(keys) else []
            )
        except RuntimeError:  # the process that has the store is gone
            return
        ranks = [_read(each, len(self._last[0])) for each in found]
        for number in sorted(set.intersection(*map(set, ranks)) if ranks else ()):
            called = [calls[number] for calls in ranks]
            if len(set(called)) > 1:
                _C.compare_requests([each[_CRC:] for each in called])

    def others_differ(self) -> bool:
        """Whether another rank has found a difference: its end may leave those that
        wait for a third."""
        try:
            return bool(self._store.check([f"{self._prefix}/differs"]))
        except RuntimeError:
            return False

    def report_stall(self, waited: float) -> None:
        """Say which ranks have called less often than this one, which waits."""
        late = []
        for rank, key in zip(self._ranks, self._keys("calls"), strict=True):
            with contextlib.suppress(RuntimeError):
                stored = self._store.get(key) if self._store.check([key]) else b""
                called = _read(stored, len(self._last[0])) if stored else {-1: b""}
                if max(called) < self._n - 1:
                    late.append(str(rank))
        named = f"rank {', '.join(late)}" if late else "data of the other ranks"
        print(
            f"ctrainer: a collective on rank {self._ranks[self._rank]} has waited "
            f"{waited:.3g} seconds for {named}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def await_others(self) -> None:
        """After a difference: the process that has the store goes when all have it."""
        end, keys = time.monotonic() + _STORE_SECONDS, self._keys("compared")
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/differs", b"")
            self._store.set(keys[self._rank], b"")
            while dist.get_rank() == 0 and time.monotonic() < end:
                if self._store.check(keys):
                    return
                time.sleep(0.01)


def _read(stored: bytes, size: int) -> dict[int, bytes]:
    """A rank's last calls by their numbers."""
    first, calls = int.from_bytes(stored[:8]), stored[8:]
    starts = range(0, len(calls), size)
    return {first + at // size: calls[at : at + size] for at in starts}


_of_groups: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()


def of_group(group: Any) -> Calls:
    """The calls in a process group, which all its Communicators share."""
    found = _of_groups.get(group)
    if found is None:
        found = _of_groups[group] = Calls(group)
    return found


def wait(work: Any, group: Any) -> None:
    """Wait for a collective of gloo.

    Raises ValueError where ranks have called for different collectives, a few seconds
    after the last of them began to wait. The group's connections are closed then, so
    that nothing reads or writes the tensors any more.
    """
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=PATIENCE_SECONDS))
        return
    calls = of_group(group)
    try:
        calls.compare()
        _wait_on(work, calls)
    except ValueError:
        _close_connections(group)
        with contextlib.suppress(RuntimeError):
            work.wait()
        calls.await_others()
        raise


def _wait_on(work: Any, calls: Calls) -> None:
    began, stall = time.monotonic() - PATIENCE_SECONDS, STALL_SECONDS
    while not work.is_completed():
        if (waited := time.monotonic() - began) >= stall:
            calls.report_stall(waited)
            stall *= 2
        if calls.others_differ():
            calls.compare()
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=PATIENCE_SECONDS))
    try:
        work.wait()
    except RuntimeError:
        calls.compare()
        raise


def _close_connections(group: Any) -> None:
    """gloo closes all connections of a group in which it gives up a receive, from a
    rank to which there still is one."""
    for other in dist.get_process_group_ranks(group):
        with contextlib.suppress(RuntimeError, ValueError):  # ValueError: this rank
            received: Any = dist.irecv(torch.empty(1, device="cpu"), other, group)
            received.wait(timedelta(milliseconds=1))
