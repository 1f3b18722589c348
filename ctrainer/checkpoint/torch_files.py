"""Files of torch.save: written without a copy, read once, and checked before anything
of them is unpickled.

The archive is C's to write and to read (every byte is compared with a checksum, each
record goes to memory of its own, which tensors then share); the pickle in it is
torch's, by its unpickler of plain data.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import _weights_only_unpickler as plain

from ctrainer import _C
from ctrainer.checkpoint.files import Expected

FILE_LIMIT = 1 << 40  # bytes

# ---- writing


class Pickler(pickle.Pickler):
    """Puts a number in the place of each storage and keeps the storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.numbers: dict[int, str] = {}
        self.records: list[Any] = []  # what holds the data, by number

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, kind, n = obj._untyped_storage, obj._pickle_storage_type(), None  # type: ignore[no-untyped-call]
        elif isinstance(obj, torch.UntypedStorage):
            storage, kind, n = obj, "UntypedStorage", obj.nbytes()
        else:
            return None
        number = self.numbers.get(storage._cdata)
        if number is None:
            number = self.numbers[storage._cdata] = str(len(self.records))
            self.records.append(_storage_bytes(storage))
        kind = getattr(torch, kind)
        n = obj._size() if n is None else n
        place = torch.serialization.location_tag(storage)
        return ("storage", kind, number, place, n)


def archive_records(
    name: str | os.PathLike[str], obj: Any, pickler_class: type[Pickler] = Pickler
) -> list[tuple[str, Any]]:
    """The records of torch.save(obj, name): pickled now, tensors by reference.

    Storages of a GPU that C does not read are copied to the host. Records that C has
    not copied yet keep the tensors alive, not their values.
    """
    file = io.BytesIO()
    pickler = pickler_class(file)
    pickler.dump(obj)
    stem = os.path.splitext(os.path.basename(os.fspath(name)))[0] or "archive"
    records: list[tuple[str, Any]] = [
        (f"{stem}/data.pkl", file.getvalue()),
        (f"{stem}/.format_version", b"1"),
        (f"{stem}/.storage_alignment", b"64"),
        (f"{stem}/byteorder", sys.byteorder.encode()),
    ]
    for i, data in enumerate(pickler.records):
        records.append((f"{stem}/data/{i}", data))
    records.append((f"{stem}/version", b"3\n"))
    return records


def _storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return there if _C.has_kernels(there) else there.cpu()


# ---- reading


def numpy_names() -> list[Any]:
    """What a pickled state of NumPy's generator names, under NumPy 1 and 2."""
    core = np._core if hasattr(np, "_core") else np.core
    rebuild = core.multiarray._reconstruct
    kinds = [np.uint32, np.int64, np.uint64, np.float64]
    return [
        rebuild,
        (rebuild, "numpy.core.multiarray._reconstruct"),
        (rebuild, "numpy._core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        *(type(np.dtype(kind)) for kind in kinds),
    ]


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array)


def load_plain(
    path: str | os.PathLike[str],
    expected: Expected,
    safe: Iterable[Any] = (),
    content: bytes | None = None,
) -> Any:
    """The plain data in a file of torch.save, on the CPU.

    expected: (bytes, crc32c) where a manifest has them. safe: what else may be
    unpickled. content: the file's bytes, already read.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or holds objects that are no plain data. Both name
            the file.
    """
    name = os.fspath(path)
    records = _C.read_archive(name, content, expected)
    if records is None and content is None:
        content = _C.read_file(name, FILE_LIMIT, expected)
    try:
        with torch.serialization.safe_globals(list(safe)):
            return (
                _legacy(content or b"") if records is None else _Loader(records).load()
            )
    except pickle.UnpicklingError as problem:  # its advice is not ours to give
        raise ValueError(_rejection(name, str(problem))) from None
    except Exception as problem:
        raise ValueError(
            f"{name}: is damaged, or no file of torch.save: "
            f"{type(problem).__name__}: {problem}"
        ) from None


def _rejection(name: str, problem: str) -> str:
    found = re.search(r"GLOBAL (\S+)", problem)
    what = f"of {found[1]} " if found else ""
    return (
        f"{name}: holds objects {what}that are no plain data, which could run code "
        "when they are loaded, or is damaged; save state_dicts, numbers, strings, "
        "lists and dicts instead"
    )


def _legacy(content: bytes) -> Any:
    """The format before torch 1.6, which has no checksums."""
    if not content:
        raise EOFError("it is empty")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


class _Loader:
    """Makes the object out of an archive's records."""

    def __init__(self, records: dict[str, memoryview]) -> None:
        self.records = records
        self.storages: dict[tuple[str, torch.dtype], Any] = {}

    def load(self) -> Any:
        order = bytes(self.records.get("byteorder", b"little"))
        if order != b"little":
            raise ValueError(f"its byte order is {order!r}, and only little is read")
        if "constants.pkl" in self.records:
            raise ValueError("it is a program of TorchScript")
        data = io.BytesIO(self.records["data.pkl"])
        unpickler: Any = plain.Unpickler(data, encoding="utf-8")
        unpickler.persistent_load = self._storage
        waiting = getattr(torch._utils, "_sparse_tensors_to_validate", [])
        try:
            value = unpickler.load()
            check = getattr(torch._utils, "_validate_loaded_sparse_tensors", None)
            if check is not None:
                check()
            return value
        finally:
            waiting.clear()

    def _storage(self, pid: Any) -> Any:
        """pid: ("storage", kind of storage, key, device, elements)."""
        kind, key, elements = pid[1], pid[2], pid[4]
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        found = self.storages.get((key, dtype))
        if found is None:
            memory = self.records[f"data/{key}"]
            if len(memory) != elements * dtype.itemsize:
                raise ValueError(
                    f"record data/{key} has {len(memory)} bytes for {elements} "
                    f"elements of {dtype}"
                )
            found = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=_storage_of(memory), dtype=dtype, _internal=True
            )
            self.storages[key, dtype] = found
        return found


def _storage_of(memory: memoryview) -> torch.UntypedStorage:
    if len(memory) == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
