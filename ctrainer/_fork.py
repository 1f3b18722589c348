"""What a forked child leaves to its parent.

A child that ends through Python's finalizers runs the parent's too: functions of atexit,
weakref.finalize, the destructors of whatever was alive. What they would end is still
the parent's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable


def by_parent_alone(function: Callable[..., object]) -> Callable[..., None]:
    """function, to be registered with atexit or weakref.finalize: it does nothing in a
    process forked from this one."""
    process = os.getpid()

    @functools.wraps(function)
    def run(*args: object) -> None:
        if os.getpid() == process:
            function(*args)

    return run
