"""NumPy: the arrays of a model that an average is of."""

from __future__ import annotations

from typing import Any

import numpy as np

from ctrainer.adapters.parameters import named_parameters

Array = np.ndarray[Any, Any]


def tensors(model: Any) -> dict[str, Array]:
    return {name: parameter.data for name, parameter in named_parameters(model)}


def pieces(value: Array, average: Array) -> list[tuple[Array, Array]]:
    """What an optimizer updates of an array, and its average: all of it."""
    return [(value, average)]


def copy_of(array: Array, fp32: bool) -> Array:
    return array.astype(np.float32) if fp32 else array.copy()


def copy_into(target: Array, source: Array) -> None:
    target[...] = source


def exchange(a: Array, b: Array) -> None:
    """Swap the contents of two arrays of one dtype."""
    kept = a.copy()
    a[...] = b
    b[...] = kept
