"""What a forked child leaves to its parent.

A child that ends through Python's finalizers runs the parent's too: functions of
atexit, weakref.finalize, the destructors of whatever was alive. What they would end is
still the parent's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator


def by_parent_alone(function: Callable[..., object]) -> Callable[..., None]:
    """function, to be registered with atexit or weakref.finalize: it does nothing in a
    process forked from this one."""
    process = os.getpid()

    @functools.wraps(function)
    def run(*args: object) -> None:
        if os.getpid() == process:
            function(*args)

    return run


def keep_torch_groups() -> None:
    """In a forked child: never take down torch's process groups. Their destructors,
    gloo's for one, wait for threads that only the parent has."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    for group in list(getattr(getattr(c10d, "_world", None), "pg_map", ())):
        import ctypes  # as torch has

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """tempfile.TemporaryDirectory, which a child that is forked meanwhile leaves."""
    folder, process = tempfile.mkdtemp(), os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == process:
            shutil.rmtree(folder)
