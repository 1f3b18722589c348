"""Runs a function as the ranks of a group, each a thread of this process.

torch runs a backward in the thread that asks for it, and collectives wait without the
GIL, so that sharded modules train as they do in processes, without their start.
torch's global generator is all threads' own: draw before, or from a torch.Generator.
"""

from __future__ import annotations

import threading
import traceback
import uuid
from collections.abc import Callable
from typing import Any

from ctrainer import _C

GROUP_SECONDS = 30.0
LIMIT_SECONDS = 60.0


def on_ranks(
    world: int,
    work: Callable[[_C.Communicator], Any],
    group_seconds: float = GROUP_SECONDS,
) -> list[Any]:
    """What work(group) returned on each rank.

    Raises AssertionError with the tracebacks of the ranks that raised or did not end.
    """
    key = f"/tmp/{uuid.uuid4()}"
    results: list[Any] = [None] * world
    failures = ["did not end"] * world

    def run(rank: int) -> None:
        group = _C.shared_memory_communicator(key, rank, world, group_seconds)
        try:
            results[rank] = work(group)
            failures[rank] = ""
        except BaseException:
            failures[rank] = traceback.format_exc()
        finally:
            group.close()  # the others need not wait for this rank

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    told = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
    assert not told, "\n".join(told)
    return results
