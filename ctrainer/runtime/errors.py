"""Exceptions that callers distinguish from others of their kind."""

from __future__ import annotations


class RankFailure(RuntimeError):
    """A collective failed because a rank died, left the group or did not come in time,
    or because the connection to it broke. The group cannot be used any more.

    Example:
        >>> from ctrainer.comm import RankFailure, world
        >>> try:
        ...     world().barrier()
        ... except RankFailure as failure:
        ...     print(failure)
    """
