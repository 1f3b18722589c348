"""The tensors of an optimizer that ranks synchronize, and memory for their copies."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def synced_tensors(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Parameters in the highest precision there is, and the model's copies or None.

    optimizer: has param_groups and perhaps state, where "master_param" is a float32
    copy that is updated; or fp32_params, tensors or a dict of them.
    """
    masters = getattr(optimizer, "fp32_params", None)
    if masters is not None:
        found = list(masters.values() if isinstance(masters, dict) else masters)
        return found, [None] * len(found)
    sources, copies = [], []
    state = getattr(optimizer, "state", {})
    for param in parameters(optimizer):
        master = state.get(param, {}).get("master_param") if param in state else None
        sources.append(param if master is None else master)
        copies.append(None if master is None else param)
    return [_values(p) for p in sources], copies


def parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


_MOMENTS = ("exp_avg", "exp_avg_sq")


def have_moments(optimizer: Any) -> bytes:
    """1 for each parameter that has been updated and has both moments, else 0, in their
    order. An update that a GPU is still busy with is awaited: it may be skipped."""
    engine = getattr(optimizer, "_engine", None)
    if engine is not None:
        engine.await_update()
    state: Mapping[Any, Mapping[str, Any]] = optimizer.state
    found = [state[p] if p in state else {} for p in parameters(optimizer)]
    return bytes(
        bool(s.get("step", 1) > 0) and all(name in s for name in _MOMENTS)
        for s in found
    )


def moments(optimizer: Any, ranks: Iterable[bytes]) -> list[Any]:
    """exp_avg and exp_avg_sq of the parameters that have both on all ranks, in their
    order: where a rank has skipped its updates, or has not used a parameter, there are
    none.

    ranks: have_moments() of each.

    Raises:
        ValueError: the ranks have different numbers of parameters.
    """
    params = parameters(optimizer)
    of_params = zip(params, zip(*ranks, strict=True), strict=True)
    found = [optimizer.state[param] for param, has in of_params if all(has)]
    return [s[name] for s in found for name in _MOMENTS]


def blanks_like(tensors: Iterable[Any]) -> list[Any]:
    """A tensor for each: float64 for one of float64, else float32."""
    return [_blank(tensor) for tensor in tensors]


def moved(values: Iterable[Any], tensors: Iterable[Any]) -> list[Any]:
    """The values of a checkpoint, on the devices of the tensors that they are of."""
    values = list(values)
    to = [getattr(tensor, "device", None) for tensor in tensors]
    places = to + [None] * (len(values) - len(to))  # too many: C says so
    return [
        value if place is None or isinstance(value, np.ndarray) else value.to(place)
        for value, place in zip(values, places, strict=False)
    ]


def _values(param: Any) -> Any:
    return param if isinstance(param, np.ndarray) else getattr(param, "data", param)


def _blank(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        wide = tensor.dtype == np.float64
        return np.empty(tensor.shape, np.float64 if wide else np.float32)
    torch = sys.modules["torch"]
    wide = tensor.dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.preserve_format)
