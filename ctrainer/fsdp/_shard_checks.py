"""Whether what a shard file says of itself has the form that the readers count on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctrainer.fsdp._shard_layout import dtype_name
from ctrainer.fsdp._torch_archive import DTYPES


def is_list_of(kind: type, value: Any) -> bool:
    """Is it a list, or tuple, of nothing else? (True and False are no int.)"""
    return isinstance(value, list | tuple) and all(type(v) is kind for v in value)


def _is_shape(value: Any) -> bool:
    return is_list_of(int, value) and all(extent >= 0 for extent in value)


def _is_unit(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(info, dict)
        and isinstance(info.get("_orig_name"), str)
        and _is_shape(info.get("_orig_size"))
        for info in value.values()
    )


def _is_flat(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 3:
        return False
    names, shapes, numels = value
    return (
        is_list_of(str, names)
        and isinstance(shapes, list | tuple)
        and all(map(_is_shape, shapes))
        and _is_shape(numels)
        and len(names) == len(shapes) == len(numels)
    )


def _is_buffer(value: Any) -> bool:
    return isinstance(value, dict) and dtype_name(value.get("_orig_dtype")) in DTYPES


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


# Table of the metadata: what an entry of it is, and the check of one.
_TABLES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "shard_info": ("shards with their '_orig_name' and '_orig_size'", _is_unit),
    "flatten_info": ("as many names, shapes and numbers of elements", _is_flat),
    "buffer_info": ("a dict of an '_orig_dtype' of torch", _is_buffer),
    "shared_info": ("the first name of the parameter", _is_name),
}


def check_metadata(path: str, metadata: Any) -> None:
    """Raise ValueError, which names the file and the entry, for what is no
    get_shard_metadata()."""
    for key in ("shard_info", "flatten_info", "buffer_info", "world_size", "rank"):
        if not isinstance(metadata, dict) or key not in metadata:
            raise ValueError(f"{path}: its shard_metadata has no {key!r}")
    for key, (expected, fits) in _TABLES.items():
        _check_table(path, key, metadata.get(key, {}), expected, fits)
    rank, world_size = metadata["rank"], metadata["world_size"]
    if not is_list_of(int, [rank, world_size]) or not 0 <= rank < world_size:
        raise ValueError(
            f"{path}: its shard_metadata has rank {rank!r} and world_size "
            f"{world_size!r}; these are integers, and 0 <= rank < world_size"
        )


def _check_table(
    path: str, key: str, table: Any, expected: str, fits: Callable[[Any], bool]
) -> None:
    if not isinstance(table, dict):
        raise ValueError(
            f"{path}: {key!r} of its shard_metadata is a {type(table).__name__}, not a "
            "dict by name"
        )
    for name, value in table.items():
        if not isinstance(name, str) or not fits(value):
            raise ValueError(
                f"{path}: {key!r} of its shard_metadata must have {expected} for each "
                f"name, has {value!r} for {name!r}"
            )


def check_optimizer(path: str, optimizer: Any) -> None:
    """Raise ValueError, which names the file, for what is no optimizer's
    state_dict()."""
    needed = {"state", "param_groups"}
    if not isinstance(optimizer, dict) or not needed <= optimizer.keys():
        raise ValueError(
            f"{path}: its 'optimizer' is no state_dict() of an optimizer, a dict of "
            "'state' and 'param_groups'"
        )
    state, groups = optimizer["state"], optimizer["param_groups"]
    if not isinstance(state, dict) or not all(map(_is_state, state.items())):
        raise ValueError(
            f"{path}: 'state' of its optimizer must have a dict of values for each "
            "parameter's number"
        )
    if not isinstance(groups, list | tuple) or not all(map(_is_group, groups)):
        raise ValueError(
            f"{path}: 'param_groups' of its optimizer must be a list of dicts, each "
            "with the numbers of its 'params'"
        )


def _is_state(entry: tuple[Any, Any]) -> bool:
    index, values = entry
    number = index.isdecimal() if isinstance(index, str) else type(index) is int
    return number and isinstance(values, dict)


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and is_list_of(int, group.get("params"))
