"""Nested batches: tensors and arrays in tuples, lists and mappings.

Source: transformers 5.17, trainer_pt_utils.py, whose names these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ctrainer import _C
from ctrainer._C import find_batch_size, nested_detach, nested_numpify
from ctrainer.arguments.accelerator import AcceleratorConfig as AcceleratorConfig
from ctrainer.comm import world

__all__ = [
    "atleast_1d",
    "distributed_concat",
    "find_batch_size",
    "nested_concat",
    "nested_detach",
    "nested_gather",
    "nested_numpify",
    "nested_truncate",
]


def atleast_1d(tensor_or_array: Any) -> Any:
    """Return a tensor or array as it is, and one without dimensions with one.

    Args:
        tensor_or_array: A tensor, an array or a number.
    """
    if not hasattr(tensor_or_array, "detach"):
        return np.atleast_1d(tensor_or_array)
    return tensor_or_array if tensor_or_array.ndim else tensor_or_array.reshape(1)


def nested_concat(tensors: Any, new_tensors: Any, padding_index: int = -100) -> Any:
    """Return the rows of two nested batches of one structure, those of `tensors` first.

    Where the second dimensions differ the shorter rows are filled on the right with
    padding_index. For many batches use ctrainer._C.ArrayAccumulator, which copies each
    row once.

    Args:
        tensors: Tensors or arrays in dicts, lists and tuples.
        new_tensors: The same structure.
        padding_index (int, default -100): What fills shorter rows.

    Raises:
        TypeError: the structures differ.
    """
    if type(tensors) is not type(new_tensors):
        raise TypeError(
            f"cannot join a {type(tensors).__name__} and a {type(new_tensors).__name__}"
        )
    if isinstance(tensors, Mapping):
        joined = {
            key: nested_concat(value, new_tensors[key], padding_index)
            for key, value in tensors.items()
        }
        return type(tensors)(joined)  # type: ignore[call-arg]
    if isinstance(tensors, list | tuple):
        pairs = zip(tensors, new_tensors, strict=True)
        return _like(tensors, [nested_concat(a, b, padding_index) for a, b in pairs])
    return _join(atleast_1d(tensors), atleast_1d(new_tensors), padding_index)


def _like(container: Any, items: list[Any]) -> Any:
    make = getattr(type(container), "_make", type(container))
    return make(items)


def _join(first: Any, second: Any, padding_index: int) -> Any:
    """Two arrays, or two tensors, below one another."""
    n, tail = first.shape[0], tuple(first.shape[1:])
    if tail:
        tail = (max(tail[0], second.shape[1]), *tail[1:])
    shape = (n + second.shape[0], *tail)
    if hasattr(first, "detach"):
        joined = first.new_full(shape, padding_index)
    else:
        joined = np.full(shape, padding_index).astype(first.dtype)
    for rows, part in ((joined[:n], first), (joined[n:], second)):
        if tail:
            rows[:, : part.shape[1]] = part
        else:
            rows[:] = part
    return joined


def nested_gather(tensors: Any, parallel_mode: Any, name: str | None = None) -> Any:
    """Return the rows of nested tensors of all ranks, in rank order, under distributed
    training; those of this one, where it is alone. All ranks have to call it.

    Args:
        tensors: Tensors in dicts, lists and tuples.
        parallel_mode (ParallelMode | str): Of the run; "distributed" gathers.
        name (str | None, default None): Not read.

    Raises:
        ValueError, TypeError: as ctrainer._C.nested_gather.
    """
    if getattr(parallel_mode, "value", parallel_mode) != "distributed":
        return tensors
    return distributed_concat(tensors)


def distributed_concat(tensor: Any, num_total_examples: int | None = None) -> Any:
    """Return the rows of nested tensors of all ranks of the run, in rank order.

    Args:
        tensor: Tensors in dicts, lists and tuples; None gives None.
        num_total_examples (int | None, default None): Keep the first so many, where
            rows were repeated so that all ranks had as many.
    """
    if tensor is None:
        return None
    rows = _C.nested_gather(tensor, world())
    if num_total_examples is None:
        return rows
    return nested_truncate(rows, num_total_examples)


def nested_truncate(tensors: Any, limit: int) -> Any:
    """Return the first rows of each tensor or array of a nested batch.

    Args:
        tensors: Tensors or arrays in dicts, lists and tuples.
        limit (int): Rows.
    """
    if isinstance(tensors, Mapping):
        short = {key: nested_truncate(value, limit) for key, value in tensors.items()}
        return type(tensors)(short)  # type: ignore[call-arg]
    if isinstance(tensors, list | tuple):
        return _like(tensors, [nested_truncate(t, limit) for t in tensors])
    return tensors[:limit]
