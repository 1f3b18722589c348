"""The last line of a terminal, rewritten in place, and what is written above it.

While the line is held, every text that Python writes to the terminal erases the line
first, on whatever object it is written: `write` of the streams themselves is replaced,
so that handlers of logging which were made earlier do so, too. Each rank and each
forked process does this; rank 0 alone draws the line again. What C code, or a process
that Python has not forked, writes is not seen.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, TextIO

from ctrainer.display.text import Progress, render

_ERASE = "\r\x1b[K"
_ABOVE = "\x1b[G\x1b[K"  # the same without \r, for which a stream would not wait
_PATIENCE_SECONDS = 1.0  # for the end of a line that another has begun
_held: Line | None = None


class Line:
    """The live line on `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.color = "NO_COLOR" not in os.environ
        encoding = getattr(stream, "encoding", None) or "ascii"
        self.ascii_only = not _encodes("━╸▁█", encoding)
        self.shown = ""  # the line as it was last drawn
        self.unfinished: float | None = None  # since when a text has no end of line
        self.process = 0  # who holds the terminal
        self.writers: list[tuple[Any, Any, Any]] = []  # stream, its write, and ours
        self.unbuffered: list[Any] = []

    def width(self) -> int:
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError):
            columns = int(os.environ.get("COLUMNS", "80"))
        # The last column would wrap on some terminals, and the ^C of a Ctrl-C has two.
        return (columns or 80) - 3

    def text(self, progress: Progress) -> str:
        return render(
            progress, self.width(), color=self.color, ascii_only=self.ascii_only
        )

    def hold(self) -> None:
        """Let texts go above the line, until release()."""
        global _held
        if _held is self:
            return
        release()
        _held, self.process = self, os.getpid()
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        for stream in {id(stream): stream for stream in streams}.values():
            with contextlib.suppress(AttributeError, ValueError):  # none, or closed
                if stream.isatty():  # type: ignore[union-attr]
                    self._replace_write(stream)

    def _replace_write(self, stream: Any) -> None:
        write = stream.write

        def write_above(text: str) -> int:
            length = len(text)
            if _held is not self or not text:
                write(text)
                return length
            if self.unfinished is None:
                text = _ABOVE + text
            whole, end, rest = text.rpartition("\n")
            write(whole + end)
            if rest:  # waits in the stream, where another rank's frame may pass it
                write(_ABOVE + rest if end else rest)
            self.unfinished = None if text[-1] in "\r\n" else time.monotonic()
            if text[-1] == "\n" and self.shown and os.getpid() == self.process:
                stream.flush()
                self._put(self.shown)
            return length

        stream.write = write_above
        if getattr(stream, "write_through", False):  # python -u, even parts of a line
            stream.reconfigure(line_buffering=True, write_through=False)
            self.unbuffered.append(stream)
        self.writers.append((stream, write, write_above))

    def draw(self, progress: Progress) -> None:
        self.shown = self.text(progress)
        now = time.monotonic()
        if self.unfinished is None or now - self.unfinished > _PATIENCE_SECONDS:
            self._put(f"{self._next_row()}\r{self.shown}\x1b[K")

    def finish(self, text: str) -> None:
        """Put a finished line in the place of the live one, which moves down."""
        self._put(f"{self._next_row()}{_ERASE}{text}\n{self.shown}")

    def clear(self) -> None:
        """The live line is over and leaves nothing."""
        self.shown = ""
        self._put(_ERASE if self.unfinished is None else "")

    def _next_row(self) -> str:
        """What brings the cursor to a row of its own."""
        if self.unfinished is None:
            return ""
        for stream, _, _ in self.writers:
            stream.flush()
        self.unfinished = None
        return "\n"

    def _put(self, text: str) -> None:
        found = [write for one, write, _ in self.writers if one is self.stream]
        (found[0] if found else self.stream.write)(text)
        self.stream.flush()


def release() -> None:
    """Return the terminal to its other users; a line that is still live stays above."""
    global _held
    line, _held = _held, None
    if line is None:
        return
    if line.shown and os.getpid() == line.process:
        shown, line.shown = line.shown, ""
        line.finish(shown)
    for stream, write, ours in line.writers:
        if stream.write is ours:
            stream.write = write
    for stream in line.unbuffered:
        stream.reconfigure(line_buffering=False, write_through=True)
    line.writers.clear()
    line.unbuffered.clear()


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True
