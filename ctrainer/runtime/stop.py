"""The end of a run that Ctrl-C or SIGTERM has stopped."""

from __future__ import annotations

import logging
import signal
import sys
from types import TracebackType
from typing import NoReturn

_SAID = "ctrainer_has_said_why"
_hook_before = sys.__excepthook__


def end_by(number: int, logger: logging.Logger | None, text: str) -> NoReturn:
    """Log the text and end as what was installed before our handlers decides.

    Where nobody catches it, the KeyboardInterrupt ends the program without a traceback:
    the text has said what happened.
    """
    global _hook_before
    if logger is not None:
        logger.warning(text)
    if number != signal.SIGINT:
        signal.raise_signal(number)
        raise SystemExit(str(128 + number))
    if sys.excepthook is not _without_traceback:
        _hook_before, sys.excepthook = sys.excepthook, _without_traceback
    stopped = KeyboardInterrupt(text)
    setattr(stopped, _SAID, True)
    raise stopped


def _without_traceback(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not hasattr(error, _SAID):
        _hook_before(kind, error, traceback)
