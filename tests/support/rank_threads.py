"""Runs a function as the ranks of a group, each a thread of this process.

torch runs a backward in the thread that asks for it, and collectives wait without the
GIL, so that sharded modules train as they do in processes, without their start.

What is global in a process belongs to all ranks at once, and which of them comes first
is chance. A rank that changes it fails: FORBIDDEN says what raises, and a draw from a
global generator is found at the end. Draw before on_ranks, under `seeded`, or from a
torch.Generator.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ctrainer import _C

GROUP_SECONDS = 120.0
LIMIT_SECONDS = 200.0

FORBIDDEN = (
    (torch, "manual_seed"),
    (torch, "seed"),
    (torch, "set_default_device"),
    (torch, "set_default_dtype"),
    (torch, "set_num_threads"),
    (torch, "use_deterministic_algorithms"),
    (np.random, "seed"),
    (random, "seed"),
    (os, "chdir"),
    (os, "putenv"),  # os.environ calls both
    (os, "unsetenv"),
    (pytest, "warns"),
    (pytest.MonkeyPatch, "delattr"),
    (pytest.MonkeyPatch, "setattr"),
)
ADVICE = "do that before on_ranks, or draw under rank_threads.seeded"
_GENERATOR = threading.RLock()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws come from torch's global generator as after manual_seed(seed), whatever
    other ranks draw. Leaves its state as it was. No collective belongs in the block."""
    with _GENERATOR:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def _alone(call: Callable[..., Any]) -> Callable[..., Any]:
    """torch's checkpoints keep the generator's state: that of no rank under seeded."""

    def called(*args: Any, **named: Any) -> Any:
        with _GENERATOR:
            return call(*args, **named)

    return called


def _rejected(owner: Any, name: str) -> Callable[..., Any]:
    """An import is left alone: it happens once, and half of one stays broken."""
    original = getattr(owner, name)

    def reject(*args: Any, **named: Any) -> Any:
        if any("importlib" in f.filename for f in traceback.extract_stack()):
            return original(*args, **named)
        raise RuntimeError(f"{name} on a rank changes it for all ranks: {ADVICE}")

    return reject


def _drawn() -> dict[str, Any]:
    """The states of the process's generators, as values that compare."""
    return {
        "torch": torch.default_generator.get_state().tolist(),
        "numpy": str(np.random.get_state()),
        "random": random.getstate(),
    }


@contextlib.contextmanager
def nothing_global_changes() -> Iterator[None]:
    """For as long as ranks are threads: FORBIDDEN raises, and a draw is an error."""
    before = _drawn()
    with contextlib.ExitStack() as stack:
        patch = lambda *given: stack.enter_context(mock.patch.object(*given))  # noqa: E731
        for owner, name in FORBIDDEN:
            patch(owner, name, _rejected(owner, name))
        for name in ("get_rng_state", "set_rng_state"):
            patch(torch, name, _alone(getattr(torch, name)))
        yield
    drawn = [name for name, state in _drawn().items() if state != before[name]]
    assert not drawn, (
        f"ranks drew from the global generator of {', '.join(drawn)}, in an order of "
        f"chance: {ADVICE}"
    )


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
    with nothing_global_changes():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
    told = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
    assert not told, "\n".join(told)
    return results
