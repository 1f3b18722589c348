"""NumPy: a model, an optimizer and other objects to files and back, without torch.

Objects are safetensors files: their arrays, and in the metadata, as JSON, what holds
them. Weights are model.safetensors, as with torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ctrainer import _C
from ctrainer.adapters.parameters import named_parameters
from ctrainer.checkpoint import NUMPY_TYPES, Sink, read_safetensors
from ctrainer.checkpoint.files import expected_of, is_there, naming, parse_json

TREE_KEY = "ctrainer.tree"

# Of types that NumPy lacks, and reads as integers, none.
_TAGS = {d: tag for tag, d in NUMPY_TYPES.items() if tag[:2] not in ("BF", "F8")}


def _file_of(name: str) -> str:
    return os.path.splitext(name)[0] + ".safetensors"


def _raw(array: np.ndarray[Any, Any]) -> tuple[Any, str, tuple[int, ...]]:
    kind = array.dtype.str[1:].replace("b1", "?")
    if kind not in _TAGS:
        raise TypeError(f"a checkpoint cannot hold an array of {array.dtype}")
    flat = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return flat.reshape(-1).view(np.uint8), _TAGS[kind], array.shape


def _flatten(value: Any, arrays: dict[str, Any]) -> Any:
    """`value` as JSON; its arrays go to `arrays`, under numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        number = str(len(arrays))
        arrays[number] = _raw(value)
        return {"array": number}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_flatten(v, arrays) for v in value]}
    if isinstance(value, Mapping):
        items = value.items()
        return {"dict": [[_flatten(k, arrays), _flatten(v, arrays)] for k, v in items]}
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}: numbers, strings, arrays, "
        "lists, tuples and dicts only"
    )


def _unflatten(value: Any, arrays: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {_unflatten(k, arrays): _unflatten(v, arrays) for k, v in content}
    parts = [_unflatten(v, arrays) for v in content]
    return tuple(parts) if kind == "tuple" else parts


def save_object(sink: Sink, name: str, obj: Any) -> None:
    """Save an object; `name` is that of torch's file for it."""
    arrays: dict[str, Any] = {}
    tree = json.dumps(_flatten(obj, arrays))
    sink.tensors(_file_of(name), arrays, {"format": "np", TREE_KEY: tree})


def load_object(folder: str, name: str) -> Any:
    """Read it back; None where there is none."""
    path = os.path.join(folder, _file_of(name))
    if not is_there(path):
        return None
    arrays = read_safetensors(path)
    with naming(path):
        tree = parse_json(arrays.metadata[TREE_KEY], f"{path}: {TREE_KEY}")
        return _unflatten(tree, arrays)


def save_arguments(sink: Sink, args: Any) -> None:
    """training_args.json, for people to read."""
    sink.json("training_args.json", json.loads(args.to_json_string()))


def save_model(sink: Sink, model: Any, state_dict: dict[str, Any] | None) -> None:
    """Save by the model's save_pretrained where it has one, else its parameters."""
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained(sink.folder, state_dict=state_dict)
        return
    state = _arrays(model) if state_dict is None else state_dict
    tensors = {name: _raw(array) for name, array in state.items()}
    sink.tensors("model.safetensors", tensors, {"format": "np"})


def _arrays(model: Any) -> dict[str, Any]:
    return {name: parameter.data for name, parameter in named_parameters(model)}


def snapshot_bytes(model: Any, optimizer: Any) -> tuple[int, None]:
    """About how much a checkpoint has to copy, weights and two moments, and None."""
    return int(3 * sum(array.nbytes for array in _arrays(model).values())), None


def load_model(model: Any, folder: str) -> None:
    """Read a checkpoint's weights into the model's arrays.

    Raises ValueError, nothing changed, where names, dtypes or shapes differ.
    """
    path = os.path.join(folder, "model.safetensors")
    _C.load_safetensors_into(path, _arrays(model), True, True, expected_of(path))


def trained_state(model: Any) -> dict[str, Any]:
    """What training changes in the model: its parameters' arrays."""
    return _arrays(model)


def load_trained_state(model: Any, state: dict[str, Any]) -> None:
    for name, array in _arrays(model).items():
        array[...] = state[name]
