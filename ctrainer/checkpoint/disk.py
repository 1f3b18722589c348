"""Files that a loss of power leaves as they were or as they are to be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
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
