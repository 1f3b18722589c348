"""Which part of which shards a tensor of the unsharded module is.

Works on names and shapes alone, so that it serves tensors in memory and in files. The
names and the metadata are those of XlaFullyShardedDataParallel (state_dict and
get_shard_metadata), plus `shared_info` for parameters of several names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

SHARD_MARK = "_fsdp_shard"


class Part(NamedTuple):
    """A parameter: `numel` elements, from `begin` on, of the shards `key` of all ranks
    laid end to end; or a buffer, which every rank has whole (begin is None)."""

    name: str
    key: str
    begin: int | None
    shape: tuple[int, ...]
    dtype: str | None  # a buffer's own, where it was cast

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def original_name(name: str) -> str:
    """Without what the wrappers have put into it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")


def with_orig_name(key: str) -> str:
    """A shard's key with what is sharded in its place, as fairscale has it."""
    return key.replace("_FSDP_SHARD_SEPARATOR_", ".").replace(f"{SHARD_MARK}.", "")


def readable(key: str) -> str:
    """A shard's key for an error's text."""
    return original_name(with_orig_name(key))


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _without_flattening(name: str) -> str:
    return name.replace("_fpw_module.", "")


def split_key(key: str) -> tuple[str, str] | None:
    """(path of the unit, name of its shard); None for a buffer."""
    words = key.split(".")
    at = next((i for i, word in enumerate(words) if word.startswith(SHARD_MARK)), None)
    return None if at is None else (".".join(words[:at]), ".".join(words[at:]))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def shard_info(key: str, metadata: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The full name (wrappers included) and shape of what the shards `key` make up.

    Raises ValueError where the metadata does not know it.
    """
    place = split_key(key)
    assert place is not None
    try:
        info = metadata["shard_info"][place[0]][place[1]]
    except KeyError:
        raise ValueError(f"shard_metadata has no shard_info of {key!r}") from None
    return _join(place[0], info["_orig_name"]), tuple(info["_orig_size"])


def sharded_keys(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if split_key(key) is not None]


def parts_of(keys: Iterable[str], metadata: dict[str, Any]) -> list[Part]:
    """Every tensor of the unsharded module, in the order of the state_dict's keys; a
    parameter of several names has a Part for each.

    Raises ValueError where metadata and keys do not fit.
    """
    # The original keeps "_fpw_module." in buffer_info and drops it in state_dict().
    buffers = {
        _without_flattening(name): dtype_name(info["_orig_dtype"])
        for name, info in metadata["buffer_info"].items()
    }
    found: list[Part] = []
    for key in keys:
        if split_key(key) is None:
            dtype = buffers.get(_without_flattening(key))
            found.append(Part(original_name(key), key, None, (), dtype))
        else:
            found.extend(_parameters(key, metadata))
    return _with_other_names(found, metadata)


def _parameters(key: str, metadata: dict[str, Any]) -> Iterator[Part]:
    name, shape = shard_info(key, metadata)
    flat = metadata["flatten_info"].get(_without_flattening(name))
    if flat is None:
        yield Part(original_name(name), key, 0, shape, None)
        return
    names, shapes, numels = flat
    if sum(numels) != math.prod(shape):
        raise ValueError(
            f"shard_metadata: the parameters of {name!r} have {sum(numels)} elements, "
            f"it has {math.prod(shape)}"
        )
    prefix = name.rpartition(".")[0]
    begin = 0
    for inner, inner_shape, numel in zip(names, shapes, numels, strict=True):
        full = original_name(_join(prefix, inner))
        yield Part(full, key, begin, tuple(inner_shape), None)
        begin += numel


def _with_other_names(parts: list[Part], metadata: dict[str, Any]) -> list[Part]:
    """`shared_info`: another name of a parameter -> the first one."""
    by_name = {part.name: part for part in parts}
    for other, first in metadata.get("shared_info", {}).items():
        kept = by_name.get(original_name(first))
        if kept is None:
            raise ValueError(
                f"shard_metadata: shared_info names {first!r}, which is not there"
            )
        name = original_name(other)
        by_name.setdefault(name, kept._replace(name=name))
    return list(by_name.values())


class Cut(NamedTuple):
    """One rank's shard: elements [begin, begin + numel) of `total`, zeros beyond."""

    begin: int
    shape: tuple[int, ...]
    total: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Division(NamedTuple):
    """How parameters are divided: by rows of dim 0, or by elements, padded to a
    multiple of world_size * multiple."""

    by_rows: bool
    multiple: int

    def shape(self, full: tuple[int, ...], world_size: int) -> tuple[int, ...]:
        """The shape of one rank's shard."""
        if self.by_rows:
            return (-(-full[0] // world_size), *full[1:])
        group = world_size * self.multiple
        return (-(-math.prod(full) // group) * self.multiple,)

    def cut(
        self, key: str, metadata: dict[str, Any], rank: int, world_size: int
    ) -> Cut:
        full = shard_info(key, metadata)[1]
        shape = self.shape(full, world_size)
        return Cut(rank * math.prod(shape), shape, math.prod(full))


def division_of(
    shapes: dict[str, tuple[int, ...]], metadata: dict[str, Any]
) -> Division:
    """How the shards `shapes` (of one rank, by key) were cut.

    Recorded by ours (`shard_param_on_dim_0`, `shard_size_multiple`), inferred for the
    original's: a shard of several dimensions tells of rows, and elements are padded to
    multiples of 128 unless a shard's length is none.
    """
    if "shard_param_on_dim_0" in metadata:
        by_rows = bool(metadata["shard_param_on_dim_0"])
        return Division(by_rows, int(metadata.get("shard_size_multiple", 128)))
    full = {key: shard_info(key, metadata)[1] for key in shapes}
    exact = all(
        shape[1:] == full[key][1:] and len(shape) == len(full[key])
        for key, shape in shapes.items()
    )
    multiple = math.gcd(128, *(math.prod(shape) for shape in shapes.values()))
    several = any(len(shape) > 1 for shape in shapes.values())
    return Division(exact and (several or multiple < 128), multiple)
