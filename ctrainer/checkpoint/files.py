"""Reading a checkpoint's files: each once, held against the manifest beside it.

Whatever lies in the place of a file (a pipe, a device, a folder, half of a file, JSON
nested too deep) costs an error that names it: a ValueError or an OSError.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from ctrainer import _C

MANIFEST_NAME = "ctrainer_manifest.json"
JSON_LIMIT = 256 << 20  # bytes; a log of a million entries has less

StrPath = str | os.PathLike[str]
Expected = tuple[int, int] | None  # (bytes, crc32c), as a manifest has them


def listed_in(folder: StrPath) -> dict[str, tuple[int, int]]:
    """What the folder's manifest lists, by name; {} without a manifest.

    Raises ValueError where it is damaged, empty, or names files outside of the folder.
    """
    try:
        return _C.read_manifest(folder)
    except FileNotFoundError:
        if os.path.lexists(os.path.join(folder, MANIFEST_NAME)):
            raise  # a link that leads nowhere
        return {}


def expected_of(path: StrPath) -> Expected:
    """What the manifest in the file's folder, or in the one above, says of the file;
    None where neither lists it."""
    folder, name = os.path.split(os.path.abspath(path))
    above, inner = os.path.split(folder)
    found = listed_in(folder).get(name)
    return found or listed_in(above).get(f"{inner}/{name}")


def is_there(path: StrPath) -> bool:
    """Is there something under this name? What it is shows when it is read.

    Raises FileNotFoundError where the manifest lists a file that has gone.
    """
    if os.path.lexists(path):
        return True
    if expected_of(path) is not None:
        raise FileNotFoundError(
            errno.ENOENT, f"{os.fspath(path)}: is missing; {MANIFEST_NAME} lists it"
        )
    return False


_TICK = 20_000_000  # nanoseconds; the clock of files moves in steps of up to 10 ms


@contextlib.contextmanager
def unchanged(*paths: StrPath) -> Iterator[Callable[[], None]]:
    """Holds files that the block checks and reads again, or maps, to what they were.

    Gives a function that raises ValueError where one has been replaced or written to
    since, for a block that publishes something to call before. It is called at the end
    of one that has not, and of one that fails.
    """
    before = [_stamp(path) for path in paths]
    settled = max((max(stamp[-2:]) for stamp in before if stamp), default=0) + _TICK
    while 0 < settled - time.time_ns() <= _TICK:  # until a later write would show
        time.sleep(_TICK / 1e9)

    checked = False

    def check() -> None:
        nonlocal checked
        checked = True
        for path, stamp in zip(paths, before, strict=True):
            if _stamp(path) != stamp:
                raise ValueError(f"{os.fspath(path)}: was changed while it was read")

    try:
        yield check
    except Exception:
        check()
        raise
    if not checked:
        check()


def _stamp(path: StrPath) -> tuple[int, ...]:
    """Values that change with a file; () without a file: its reader raises."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    times = found.st_mtime_ns, found.st_ctime_ns
    return found.st_dev, found.st_ino, found.st_size, *times


_MISFITS = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
    struct.error,
)  # fmt: skip


@contextlib.contextmanager
def naming(path: StrPath) -> Iterator[None]:
    """Lets errors of the block, which takes the file's content over, name the file."""
    try:
        yield
    except _MISFITS as error:
        text = os.fspath(path)
        if isinstance(error, ValueError) and text in str(error):
            raise
        raise ValueError(
            f"{text}: holds what does not fit here: {type(error).__name__}: {error}; "
            "load it into what saved it"
        ) from error


# JSON


def read_json(path: StrPath) -> Any:
    """The content of a JSON file, as strict as RFC 8259 but for NaN and infinities,
    which logs have."""
    text = _C.read_file(path, JSON_LIMIT, expected_of(path))
    return parse_json(text, os.fspath(path))


def parse_json(content: bytes | str, name: str) -> Any:
    """Raises ValueError, which names the file, where the content is no whole JSON."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_members)
        if "\\u" in text:  # half of a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{name}: is nested too deep to be read") from None
    except ValueError as problem:
        raise ValueError(f"{name}: is not whole JSON: {problem}") from None
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return members


def read_object(path: StrPath) -> dict[str, Any]:
    """The JSON object in a file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(
            f"{os.fspath(path)} must hold a JSON object, not {type(content).__name__}"
        )
    return content
