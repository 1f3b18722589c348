"""Damages of a checkpoint's files, drawn at random, and what may come of them.

A reader is given a folder that has one damage. It raises an error of ours that names a
file of the folder, or its result is to the bit that of the whole folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ctrainer.checkpoint import MANIFEST_NAME, CheckpointWriter

SECONDS = 20  # a reader that takes longer hangs


class Damage(NamedTuple):
    text: str
    # The folder is consistent in itself: no checksum is left to tell the change.
    forged: bool = False


# ---- bytes


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 3))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.choice((rng.randrange(len(data)), len(data) - 1)) :]


def _extend(data: bytearray, rng: random.Random) -> None:
    n = rng.choice((1, 8, 22, 64, 5000))
    data += rng.choice((bytes(n), rng.randbytes(n), bytes(data[-n:]), bytes(data)))


def _zero(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    n = min(rng.choice((1, 16, 512, 4096)), len(data) - at)
    data[at : at + n] = bytes(n)


def _noise(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    n = min(rng.choice((1, 4, 64)), len(data) - at)
    data[at : at + n] = rng.randbytes(n)


def _move(data: bytearray, rng: random.Random) -> None:
    """Bytes of one place are lost, and all that follow come sooner."""
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 8, 64))]


BYTES = (_flip, _flip, _flip, _cut, _extend, _zero, _noise, _move)


# ---- formats


def _field_of_zip(data: bytearray, rng: random.Random) -> None:
    """Another number in a header, an entry of the directory or an end of an archive."""
    signature, fields = rng.choice(
        (
            (b"PK\x03\x04", (4, 6, 8, 14, 18, 22, 26, 28, 30)),
            (b"PK\x01\x02", (8, 10, 16, 20, 24, 28, 30, 32, 42, 46)),
            (b"PK\x05\x06", (4, 8, 10, 12, 16, 20)),
        )
    )
    places = []
    at = data.find(signature)
    while at >= 0:
        places.append(at)
        at = data.find(signature, at + 1)
    if not places:
        _flip(data, rng)
        return
    at = rng.choice(places) + rng.choice(fields)
    value = rng.choice((0, 1, 0xFF, 0xFFFF, 0xFFFFFFFF, rng.getrandbits(32), len(data)))
    raw = struct.pack("<I", value)[: rng.choice((1, 2, 4))]
    data[at : at + len(raw)] = raw


def _header_of_safetensors(data: bytearray, rng: random.Random) -> None:
    n = int.from_bytes(data[:8], "little")
    if n > len(data) - 8:
        _flip(data, rng)
        return
    if rng.random() < 0.2:
        n = rng.choice((0, 1, n - 1, n + 1, n + 8, len(data), 1 << 40, (1 << 64) - 1))
        data[:8] = n.to_bytes(8, "little")
        return
    header = bytearray(data[8 : 8 + n])
    try:
        text = mutated(bytes(header), rng)
    except ValueError:
        _flip(data, rng)
        return
    data[: 8 + n] = len(text).to_bytes(8, "little") + text


def _json(data: bytearray, rng: random.Random) -> None:
    try:
        data[:] = mutated(bytes(data), rng)
    except ValueError:
        _flip(data, rng)


def _other(value: Any, rng: random.Random) -> Any:
    """A value of another type or out of range."""
    choices: list[Any] = [
        None, True, False, -1, 0, 2**31, 2**63, 10**400, -0.5, 1e308, float("nan"),
        float("inf"), "", "text", "a\0b", "../x", "\ud800", [], {}, [1], {"a": 1},
        [value], {"dict": value}, "0" * 5000,
    ]  # fmt: skip
    if isinstance(value, int | float) and not isinstance(value, bool):
        choices += [value + 1, -value, str(value), value * 1.5]
    if isinstance(value, str):
        choices += [value + "x", value[:-1], value.upper()]
    if isinstance(value, list):
        choices += [value[:-1], value + value, value[::-1]]
    return rng.choice(choices)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def mutated(text: bytes, rng: random.Random) -> bytes:
    """JSON with one change; raises ValueError where the text is no JSON."""
    kind = rng.randrange(10)
    if kind == 0:
        depth = rng.choice((70, 2000, 200_000))
        return rng.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth))
    if kind == 1:
        at = rng.randrange(len(text) + 1)
        odd = rng.choice((b"\xff", b"\xed\xa0\x80", b"\0", b"\xc0\xaf"))
        return text[:at] + odd + text[at:]
    content = json.loads(text)
    places = list(_places(content))
    if not places or kind == 2:
        return json.dumps(_other(content, rng)).encode()
    holder, key = rng.choice(places)
    if kind == 3 and isinstance(holder, dict):
        whole, again = json.dumps(content), json.dumps({key: holder[key]})[1:-1]
        part = json.dumps(holder)
        return whole.replace(part, f"{{{again}, {part[1:]}", 1).encode()
    if kind == 4:
        del holder[key]
    elif kind == 5 and isinstance(holder, dict):
        holder[rng.choice((str(key) + "x", "", "a\0b", "extra"))] = holder.pop(key)
    elif kind == 6 and len(places) > 1:
        other, place = rng.choice(places)
        taken = json.loads(json.dumps(other[place]))
        holder[key] = taken
    else:
        holder[key] = _other(holder[key], rng)
    return json.dumps(content).encode("utf-8", "surrogatepass")


# ---- whole files


def _in_place(path: Path, donor: Path, rng: random.Random) -> str:
    """Something else than the file under its name."""
    kind = rng.randrange(9)
    path.unlink()
    if kind == 0:
        return "deleted"
    if kind == 1:
        path.touch()
        return "empty"
    if kind == 2:
        os.mkfifo(path)
        return "a pipe"
    if kind == 3:
        path.mkdir()
        return "a folder"
    if kind == 4:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/random", "/dev/null")))
        return "a link to a device"
    if kind == 5:
        path.symlink_to("nowhere")
        return "a link to nothing"
    if kind == 6:
        path.symlink_to(path.name)
        return "a link to itself"
    others = [p for p in donor.iterdir() if p.is_file()]
    twin = donor / path.name
    source = twin if kind == 7 and twin.exists() else rng.choice(others)
    shutil.copyfile(source, path)
    return f"{source.name} of another checkpoint"


def sign(folder: Path) -> None:
    """Make a manifest of the folder's files as they are."""
    aside = folder.with_name(f"{folder.name}-signed")
    shutil.rmtree(aside, ignore_errors=True)
    writer = CheckpointWriter()
    inside = Path(writer.begin(aside))
    for path in folder.iterdir():
        if path.is_file() and path.name != MANIFEST_NAME:
            shutil.copyfile(path, inside / path.name)
    writer.commit(wait=True)
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.copyfile(aside / MANIFEST_NAME, folder / MANIFEST_NAME)
    shutil.rmtree(aside)


def damage(folder: Path, donor: Path, names: list[str], rng: random.Random) -> Damage:
    """Damage one of the named files of a folder, as the generator says. donor: another
    checkpoint's folder with files of the same names."""
    name = rng.choice(names)
    path = folder / name
    if rng.random() < 0.2:
        return Damage(f"{name}: {_in_place(path, donor, rng)}")
    changes: list[Callable[[bytearray, random.Random], None]] = list(BYTES)
    if path.suffix == ".json":
        changes = [*BYTES[:2], *[_json] * 6]
    elif path.suffix == ".safetensors":
        changes += [_header_of_safetensors] * 6
    else:
        changes += [_field_of_zip] * 6
    change = rng.choice(changes)
    data = bytearray(path.read_bytes())
    change(data, rng)
    path.write_bytes(data)
    signed = (folder / MANIFEST_NAME).is_file() and name != MANIFEST_NAME
    forged = signed and rng.random() < 0.25
    if forged:
        sign(folder)
    return Damage(f"{name}: {change.__name__}{', signed' if forged else ''}", forged)


# ---- outcomes


@contextmanager
def in_time() -> Iterator[None]:
    """Fail where the block hangs, in the main thread."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"still reading after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_ours(error: BaseException, folder: Path) -> bool:
    """An error of ours, which names a file of the folder or the folder itself."""
    raw = UnicodeError | json.JSONDecodeError
    known = type(error) in (
        Exception,
        AssertionError,
    )  # words of fairseq's, torch-xla's
    known = known or isinstance(error, ValueError | OSError)
    return known and not isinstance(error, raw) and str(folder) in str(error)


class Judge:
    """Reads damaged copies of a folder; counts what came of it.

    `same` compares two results; it is asked where the reader has raised nothing.
    """

    def __init__(
        self,
        folder: Path,
        donor: Path,
        names: list[str],
        read: Callable[[Path], Any],
        same: Callable[[Any, Any], bool],
    ) -> None:
        self.folder, self.donor, self.names = folder, donor, names
        self.read, self.same = read, same
        self.kept = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        self.right = read(folder)
        self.counts = {"rejected": 0, "right": 0, "forged": 0}

    def restore(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif (
                path.is_symlink()
                or path.name not in self.kept
                or not path.is_file()
                or path.read_bytes() != self.kept[path.name]
            ):
                path.unlink()
        for name, data in self.kept.items():
            if not (self.folder / name).exists():
                (self.folder / name).write_bytes(data)

    def run(self, seed: int) -> None:
        self.restore()
        found = damage(self.folder, self.donor, self.names, random.Random(seed))
        told = f"seed {seed}: {found.text}"
        try:
            with in_time():
                result = self.read(self.folder)
        except Exception as error:
            if not is_ours(error, self.folder):
                raise AssertionError(f"{told}: {error!r}") from error
            self.counts["rejected"] += 1
            return
        if self.same(self.right, result):
            self.counts["right"] += 1
            return
        assert found.forged, f"{told}: read as something else"
        self.counts["forged"] += 1
