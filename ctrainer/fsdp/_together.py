"""Several files that appear together or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ctrainer.checkpoint.disk import sync_folder_of

SAVING = ".ctrainer-saving"  # ends the name of a file that is being written
KEPT = f".kept{SAVING}"  # ends the name of a file that is about to be replaced


def write_together(
    writers: Mapping[str, Callable[[str], None]], check: Callable[[], None]
) -> None:
    """Call every path's writer with where to write, then check(), then let all files
    appear.

    A writer's file has to be whole and on the disk when it returns. Raises what a
    writer, check() or a rename raises; then every path has what it had. A process that
    is killed among the renames leaves some of the new files and some of the earlier
    ones.
    """
    asides = {path: f"{path}{SAVING}" for path in writers}
    try:
        for path, write in writers.items():
            write(asides[path])
        check()
        with contextlib.ExitStack() as kept:
            for path, aside in asides.items():
                kept.enter_context(_taken_back(path))
                os.replace(aside, path)
    finally:
        for aside in asides.values():
            Path(aside).unlink(missing_ok=True)
    for path in {os.path.dirname(path): path for path in writers}.values():
        sync_folder_of(path)


@contextlib.contextmanager
def _taken_back(path: str) -> Iterator[None]:
    """If the block fails, what was at path is there again."""
    kept = f"{path}{KEPT}"
    was_there = _keep(path, kept)
    try:
        yield
    except BaseException:
        if was_there:
            os.replace(kept, path)
        else:
            Path(path).unlink(missing_ok=True)
        raise
    Path(kept).unlink(missing_ok=True)


def _keep(path: str, kept: str) -> bool:
    """Let the file be at kept, too; whether there is one."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    Path(kept).unlink(missing_ok=True)
    if not os.path.lexists(path):
        return False
    try:
        os.link(path, kept)
    except OSError:  # a file system without links: it is away for a moment
        os.replace(path, kept)
    return True
