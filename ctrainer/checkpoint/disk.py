"""Files that a loss of power leaves as they were or as they are to be: one, or several
together.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

StrPath = str | os.PathLike[str]


@contextmanager
def replacing(path: StrPath) -> Iterator[str]:
    """Where the block is to write what then takes the place of `path`: the content is
    on the disk before it has that name, and the name when this returns."""
    beside = f"{os.fspath(path)}.saving"
    try:
        yield beside
        _sync(beside)
        os.replace(beside, path)
    finally:
        Path(beside).unlink(missing_ok=True)
    sync_folder_of(path)


def sync_folder_of(path: StrPath) -> None:
    """Renames in the folder of `path` outlive a loss of power."""
    _sync(os.path.dirname(path) or ".")


def _sync(path: StrPath) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # a file system that has nothing to sync
            raise
    finally:
        os.close(opened)


# Several files that appear together or not at all.


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
