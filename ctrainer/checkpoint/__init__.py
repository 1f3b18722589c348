"""Checkpoints without a trainer: writing, reading, judging and finding them."""

from __future__ import annotations

import atexit
import base64
import json
import logging
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ctrainer import _C
from ctrainer.checkpoint.files import (
    MANIFEST_NAME,
    expected_of,
    naming,
    read_object,
)
from ctrainer.checkpoint.schema import (
    FORMER_SUMS,
    LOSS_SUMS,
    OWN_STATE,
    OWN_VERSION,
    POSITION,
    TRAINER_STATE,
    Kind,
    check_fields,
    check_version,
    mapping,
)

__all__ = [
    "CheckpointWriter",
    "Tensors",
    "find_checkpoints",
    "last_whole_checkpoint",
    "load_safetensors_into",
    "read_safetensors",
    "verify_checkpoint",
]

logger = logging.getLogger("ctrainer.checkpoint")

PREFIX = "checkpoint"
SAVING = ".ctrainer-saving-"  # as in csrc/core/checkpoint/writer.c
STATE_NAME = "trainer_state.json"
_OWN_STATE_NAME = re.compile(r"ctrainer_state(_\d+)?\.json")
StrPath = str | os.PathLike[str]

_writers: weakref.WeakSet[CheckpointWriter] = weakref.WeakSet()
os.register_at_fork(after_in_child=_writers.clear)  # a child has nothing to finish


class CheckpointWriter(_C.CheckpointWriter):
    """Saves folders of files in the background, each whole or not at all.

    begin() returns a temporary folder beside the final one; add_* put files into it and
    so may anybody else; commit() passes it to a thread of C, which writes, synchronises
    and renames it. docs/concepts/checkpoints.md says what is guaranteed.

    Args of methods:
        name (str): Of the file, in the folder.
        data (bytes): Its content.
        tensors (dict): Tensors or arrays by name.
        metadata (dict[str, str] | None): Texts of a safetensors file.
        records: (name, data) pairs of an archive.
        snapshot (bool): Copy the data now; False: write it before returning.

    Example:
        >>> from ctrainer.checkpoint import CheckpointWriter
        >>> writer = CheckpointWriter()
        >>> folder = writer.begin("checkpoint-1")
        >>> writer.add_bytes("state.txt", b"step 1")
        >>> writer.commit()
        >>> writer.wait()
        >>> open("checkpoint-1/state.txt").read()
        'step 1'
    """

    snapshots = True  # of the files that a Sink adds

    def __init__(self) -> None:
        _writers.add(self)

    def add_torch(self, name: StrPath, obj: Any, *, snapshot: bool = True) -> None:
        """Add what torch.save(obj, name) would write; obj is pickled now.

        Args:
            name (StrPath): Of the file, in the folder.
            obj: What torch.save takes.
            snapshot (bool, default True): Copy the tensors now; False: they must not
                change until the save is done.
        """
        from ctrainer.checkpoint.torch_files import archive_records

        records = archive_records(name, obj)
        self.add_archive(name, records, snapshot=snapshot)


@atexit.register
def _finish_saves() -> None:
    """A process that ends in order finishes what it had begun to save."""
    for writer in list(_writers):
        try:
            writer.wait()
        except (OSError, RuntimeError) as problem:
            logger.error("The last checkpoint could not be saved: %s", problem)


# Reading


class Tensors(dict[str, Any]):
    """NumPy arrays by name; bfloat16 as its bits in uint16, types of eight bits as
    uint8.

    `dtypes` has each tensor's type in the file, `metadata` the file's texts by name.

    Example:
        >>> import numpy as np
        >>> from ctrainer.checkpoint import CheckpointWriter, read_safetensors
        >>> writer = CheckpointWriter()
        >>> folder = writer.begin("checkpoint-1")
        >>> writer.add_safetensors("model.safetensors", {"w": np.ones(2, np.float32)})
        >>> writer.commit()
        >>> writer.wait()
        >>> read_safetensors("checkpoint-1/model.safetensors").dtypes
        {'w': 'F32'}
    """

    dtypes: dict[str, str]
    metadata: dict[str, str]


NUMPY_TYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "F16": "f2",
    "BF16": "u2", "U32": "u4", "I32": "i4", "F32": "f4", "C64": "c8", "U64": "u8",
    "I64": "i8", "F64": "f8", "F8_E5M2": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1",
}  # fmt: skip


def read_safetensors(path: StrPath, *, check: bool = True) -> Tensors:
    """Return the arrays of a safetensors file, read without torch.

    A file that the manifest beside it lists is held against that.

    Args:
        path (StrPath): The file.
        check (bool, default True): Compare the data with the checksum that ctrainer
            wrote into the file.

    Raises:
        ValueError: the file is not whole or, with `check`, its data differs from its
            checksum.

    Example:
        >>> import numpy as np
        >>> from ctrainer.checkpoint import CheckpointWriter, read_safetensors
        >>> writer = CheckpointWriter()
        >>> folder = writer.begin("checkpoint-1")
        >>> writer.add_safetensors("model.safetensors", {"w": np.ones(2, np.float32)})
        >>> writer.commit()
        >>> writer.wait()
        >>> read_safetensors("checkpoint-1/model.safetensors")["w"]
        array([1., 1.], dtype=float32)
    """
    metadata, index = _C.safetensors_index(path)
    found = Tensors()
    found.metadata = metadata
    found.dtypes = {name: tag for name, tag, _, _ in index}
    targets: dict[str, Any] = {}
    for name, tag, shape, nbytes in index:
        memory = np.empty(nbytes, np.uint8)
        with naming(path):
            found[name] = memory.view(NUMPY_TYPES[tag]).reshape(shape)
        targets[name] = (memory, tag, shape)
    expected = expected_of(path) if check else None
    _C.load_safetensors_into(path, targets, True, check, expected)
    return found


def load_safetensors_into(
    path: StrPath,
    tensors: Mapping[str, Any],
    *,
    strict: bool = True,
    check: bool = True,
) -> tuple[list[str], list[str]]:
    """Read a safetensors file straight into the memory of named tensors or arrays.

    Args:
        path (StrPath): The file.
        tensors (Mapping[str, Any]): Contiguous, on the CPU, with the dtypes and shapes
            of the file.
        strict (bool, default True): Let the names be exactly the file's.
        check (bool, default True): Compare the data with the checksum that ctrainer
            wrote into the file.

    Returns:
        The names that the file lacks, and those of the file that were not asked for.

    Raises:
        ValueError: something does not fit, found before anything is changed; or, with
            `check`, the data is damaged, found when it has been read.

    Example:
        >>> import numpy as np
        >>> from ctrainer.checkpoint import CheckpointWriter, load_safetensors_into
        >>> writer = CheckpointWriter()
        >>> folder = writer.begin("checkpoint-1")
        >>> writer.add_safetensors("model.safetensors", {"w": np.ones(2, np.float32)})
        >>> writer.commit()
        >>> writer.wait()
        >>> w = np.zeros(2, np.float32)
        >>> load_safetensors_into("checkpoint-1/model.safetensors", {"w": w})
        ([], [])
        >>> w
        array([1., 1.], dtype=float32)
    """
    expected = expected_of(path) if check else None
    return _C.load_safetensors_into(path, dict(tensors), strict, check, expected)


# Judging


def verify_checkpoint(folder: StrPath) -> list[str]:
    """Return what is wrong with a checkpoint's folder; [] when it is whole.

    With ctrainer's manifest every file is compared with its size and checksum. A folder
    of another program is judged by its files: those that a checkpoint needs have to be
    there, and every file has to be complete in its format. Nothing is unpickled.

    Args:
        folder (StrPath): The folder.

    Example:
        >>> from ctrainer.checkpoint import verify_checkpoint
        >>> verify_checkpoint("checkpoint-1")
        ['checkpoint-1: no such folder']
    """
    if not os.path.isdir(folder):
        return [f"{os.fspath(folder)}: no such folder"]
    try:
        if os.path.lexists(os.path.join(folder, MANIFEST_NAME)):
            states = filter(_is_state, os.listdir(folder))
            return _C.verify_manifest(folder) or list(_damaged(Path(folder), states))
        return list(_judge_files(Path(folder)))
    except (OSError, ValueError) as problem:
        return [_text(problem)]


def _text(problem: OSError | ValueError) -> str:
    return str(getattr(problem, "strerror", None) or problem)


def _judge_files(folder: Path) -> Iterator[str]:
    names = {p.name for p in folder.iterdir() if p.is_file()}
    yield from _missing_files(folder, names)
    yield from _damaged(folder, names)


def _damaged(folder: Path, names: Iterable[str]) -> Iterator[str]:
    for name in sorted(names):
        try:
            _judge_file(folder / name)
        except (OSError, ValueError) as problem:
            yield _text(problem)


def _is_state(name: str) -> bool:
    return name == STATE_NAME or bool(_OWN_STATE_NAME.fullmatch(name))


_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def _missing_files(folder: Path, names: set[str]) -> Iterator[str]:
    if "trainer_state.json" not in names:
        yield f"{folder}: lacks trainer_state.json"
    if not names.intersection(_WEIGHTS + _INDEXES) and not any(
        (p / "adapter_config.json").exists() for p in folder.iterdir()
    ):
        yield f"{folder}: lacks the weights (model.safetensors or the like)"
    if ("optimizer.pt" in names) != ("scheduler.pt" in names):
        yield f"{folder}: has one of optimizer.pt and scheduler.pt without the other"
    for index in names.intersection(_INDEXES):
        for shard in shard_names(folder / index):
            if shard not in names:
                yield f"{folder / shard}: is missing; {index} names it"


def shard_names(index: StrPath) -> list[str]:
    """The files that an index of shards names, sorted."""
    content = read_object(index)
    check_fields(index, content, {"weight_map": mapping(_FILE)}, ("weight_map",))
    if not content["weight_map"]:
        raise ValueError(f"{os.fspath(index)}: names no files")
    return sorted(set(content["weight_map"].values()))


_FILE = Kind(
    "a file's name",
    lambda v: (
        isinstance(v, str)
        and bool(v)
        and not {"/", "\0"} & set(v)
        and v not in (os.curdir, os.pardir)
    ),
)


def read_trainer_state(path: StrPath) -> dict[str, Any]:
    """trainer_state.json, held against its table."""
    content = read_object(path)
    check_fields(path, content, TRAINER_STATE)
    return content


def read_own_state(path: StrPath) -> dict[str, Any]:
    """ctrainer_state.json or a rank's, held against its tables; what "resume" holds has
    been through from_json()."""
    content = read_object(path)
    check_version(path, content, OWN_VERSION)
    check_fields(path, content, OWN_STATE, ("version", "loss", "resume"))
    check_fields(path, content["loss"], LOSS_SUMS, where="loss")
    for name in FORMER_SUMS:
        content["loss"].pop(name, None)
    with naming(path):
        content["resume"] = from_json(content["resume"])
    check_fields(path, content["resume"], POSITION, where="resume")
    return content


def _judge_file(path: Path) -> None:
    if path.suffix == ".safetensors":
        _C.safetensors_index(path, True)
    elif path.name == STATE_NAME:
        read_trainer_state(path)
    elif path.suffix == ".json" and _is_state(path.name):
        read_own_state(path)
    elif path.name in _INDEXES:
        shard_names(path)
    elif path.name == "config.json":
        read_object(path)
    elif path.suffix in (".pt", ".pth", ".bin") and _is_archive(path):
        _C.archive_index(path, None)


def _is_archive(path: Path) -> bool:
    """torch's files are archives since 1.6; older ones, and .bin files of others, are
    not ours to judge, but an empty one is none of these."""
    with open(path, "rb") as file:
        head = file.read(4)
    if not head:
        raise ValueError(f"{path}: is empty")
    return head == b"PK\x03\x04" or path.suffix != ".bin"


# Finding


def _is_being_saved(entry: os.DirEntry[str]) -> bool:
    """Is it the link under which an override of _save_checkpoint finds its files?"""
    return entry.is_symlink() and os.readlink(entry.path).startswith(SAVING)


def find_checkpoints(output_dir: StrPath, prefix: str = PREFIX) -> list[str]:
    """Return the folders `prefix`-N of output_dir, by rising N.

    Args:
        output_dir (StrPath): Where to look.
        prefix (str, default 'checkpoint'): Of the folders' names.

    Raises:
        OSError: output_dir cannot be read.

    Example:
        >>> import os
        >>> from ctrainer.checkpoint import find_checkpoints
        >>> os.makedirs("out/checkpoint-10"); os.makedirs("out/checkpoint-9")
        >>> find_checkpoints("out")
        ['out/checkpoint-9', 'out/checkpoint-10']
    """
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    found = []
    with os.scandir(output_dir) as entries:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match and entry.is_dir() and not _is_being_saved(entry):
                found.append((int(match[1]), os.path.join(output_dir, entry.name)))
    return [path for _, path in sorted(found)]


def last_whole_checkpoint(output_dir: StrPath) -> str | None:
    """Return the newest checkpoint that verify_checkpoint finds whole; None without
    one.

    Warns of each newer one that is skipped, with what is wrong with it. One that lost
    its name when a process was killed while it replaced it gets that back.

    Args:
        output_dir (StrPath): Where to look.

    Example:
        >>> from ctrainer.checkpoint import last_whole_checkpoint
        >>> last_whole_checkpoint("nowhere")
    """
    if not os.path.isdir(output_dir):
        return None
    _C.recover_saves(output_dir)
    for folder in reversed(find_checkpoints(output_dir)):
        problems = verify_checkpoint(folder)
        if not problems:
            return folder
        logger.warning("Skipping %s: %s", folder, "; ".join(problems))
    return None


# Where the files of one folder go


class Sink:
    """Files for a folder: into the save that is open there, else straight to the disk,
    each whole or not at all."""

    def __init__(self, folder: StrPath, writer: CheckpointWriter | None) -> None:
        self.folder = os.path.abspath(folder)
        self.writer = None
        self.prefix = ""
        staged = None if writer is None else writer.folder
        if staged is not None:
            inside = os.path.relpath(self.folder, os.path.abspath(staged))
            if inside.split(os.sep)[0] != os.pardir:
                self.writer = writer
                self.prefix = "" if inside == os.curdir else inside

    def tensors(
        self, name: str, tensors: dict[str, Any], metadata: dict[str, str] | None = None
    ) -> None:
        metadata = dict(metadata or {"format": "pt"})
        if self.writer is None:
            _C.write_safetensors(os.path.join(self.folder, name), tensors, metadata)
        else:
            path, copied = os.path.join(self.prefix, name), self.writer.snapshots
            self.writer.add_safetensors(path, tensors, metadata, snapshot=copied)

    def archive(self, name: str, records: list[tuple[str, Any]]) -> None:
        if self.writer is None:
            _C.write_archive(os.path.join(self.folder, name), records)
        else:
            path, copied = os.path.join(self.prefix, name), self.writer.snapshots
            self.writer.add_archive(path, records, snapshot=copied)

    def json(self, name: str, content: Any) -> None:
        path = os.path.join(self.folder, name)
        with open(f"{path}.saving", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(f"{path}.saving", path)


# States of generators and the like, as JSON


def to_json(value: Any) -> Any:
    """A nest of numbers, strings, bytes, lists, tuples, dicts, arrays and tensors as
    JSON. Raises TypeError for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_json(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [to_json(v) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": [[to_json(k), to_json(v)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    kind = "array" if isinstance(value, np.ndarray) else "tensor"
    array = np.ascontiguousarray(value) if hasattr(value, "__array__") else None
    if array is None or array.dtype.hasobject:
        raise TypeError(f"a {type(value).__name__} is no plain data")
    data = base64.b64encode(array.tobytes()).decode()
    return {kind: [array.dtype.str, list(array.shape), data]}


def from_json(value: Any) -> Any:
    """The inverse of to_json."""
    if isinstance(value, list):
        return [from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(from_json(v) for v in content)
    if kind == "dict":
        return {from_json(k): from_json(v) for k, v in content}
    if kind == "bytes":
        return base64.b64decode(content)
    dtype, shape, data = content
    flat = np.frombuffer(base64.b64decode(data), dtype)
    array = flat.reshape(shape).copy()
    if kind == "array":
        return array
    from ctrainer.checkpoint.torch_files import tensor_of

    return tensor_of(array)
