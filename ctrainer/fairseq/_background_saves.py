"""Checkpoints that are written while training goes on (--save-async)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["BackgroundSaves"]


class BackgroundSaves:
    """Runs what belongs to a save in a thread, in order; after a failure nothing more
    until wait() has raised it. A process that ends in order finishes what was begun."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._problem: BaseException | None = None
        self._last: Callable[[], None] | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Run job() after those before it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._last = self._pool.submit(self._run, job).result

    def _run(self, job: Callable[[], None]) -> None:
        if self._problem is None:
            try:
                job()
            except BaseException as problem:
                self._problem = problem

    def wait(self) -> None:
        """Return when all is written; raise what has failed since the last time."""
        if self._last is not None:
            self._last()
            self._last = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise OSError(
                f"a checkpoint could not be written in the background: {problem}"
            ) from problem
