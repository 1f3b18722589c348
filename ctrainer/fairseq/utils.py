"""Odds and ends by the names of fairseq's utils.py."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq.meters import safe_round

__all__ = [
    "deprecation_warning",
    "eval_bool",
    "eval_str_list",
    "get_activation_fn",
    "get_perplexity",
    "has_parameters",
    "import_user_module",
    "item",
    "log_softmax",
    "make_positions",
    "resolve_max_positions",
    "set_torch_seed",
    "softmax",
    "split_paths",
    "strip_pad",
]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "linear": lambda x: x,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "swish": F.silu,
    "tanh": torch.tanh,
}
has_parameters = tools.has_parameters
set_torch_seed = tools.seed


def get_activation_fn(activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an activation.

    Args:
        activation (str): Its name.

    Raises:
        ValueError: there is none; the message has those that there are.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"--activation-fn {activation} not supported; choose "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[activation]


def softmax(x: torch.Tensor, dim: int, onnx_trace: bool = False) -> torch.Tensor:
    """Return the softmax, in float32, whatever x is.

    Args:
        x (torch.Tensor): Logits.
        dim (int): Along which it sums to 1.
        onnx_trace (bool, default False): Not read.
    """
    return F.softmax(x, dim=dim, dtype=torch.float32)


def log_softmax(x: torch.Tensor, dim: int, onnx_trace: bool = False) -> torch.Tensor:
    """Return the logarithm of the softmax, in float32, whatever x is.

    Args:
        x (torch.Tensor): Logits.
        dim (int): Along which it sums to 1.
        onnx_trace (bool, default False): Not read.
    """
    return F.log_softmax(x, dim=dim, dtype=torch.float32)


def make_positions(
    tensor: torch.Tensor, padding_idx: int, onnx_trace: bool = False
) -> torch.Tensor:
    """Return positions of words in a row, from padding_idx + 1; padding has
    padding_idx.

    Args:
        tensor (torch.Tensor): Words, (rows, length).
        padding_idx (int): The number of padding.
        onnx_trace (bool, default False): Not read.
    """
    words = tensor.ne(padding_idx).long()
    return words.cumsum(1) * words + padding_idx


def strip_pad(tensor: torch.Tensor, pad: int) -> torch.Tensor:
    """Return the words that are no padding.

    Args:
        tensor (torch.Tensor): Words.
        pad (int): The number of padding.
    """
    return tensor[tensor.ne(pad)]


def item(tensor: Any) -> Any:
    """Return the number of a tensor of one; anything else as it is.

    Args:
        tensor: A tensor, or anything.
    """
    return tensor.item() if hasattr(tensor, "item") else tensor


def get_perplexity(loss: Any, round: int = 2, base: float = 2) -> float:
    """Return base ** loss, rounded; 0 for no loss, Inf beyond the greatest number.

    Args:
        loss: By the base's logarithm, or None.
        round (int, default 2): Decimals.
        base (float, default 2): The base.
    """
    if loss is None:
        return 0.0
    try:
        return float(safe_round(base**loss, round))
    except OverflowError:
        return float("inf")


def split_paths(paths: str, separator: str = os.pathsep) -> list[str]:
    """Return several paths; one that has a URL's "://" stays whole.

    Args:
        paths (str): Their text.
        separator (str, by default os.pathsep): Between them, by default the system's.
    """
    return [paths] if "://" in paths else paths.split(separator)


def eval_str_list(x: Any, type: Callable[[Any], Any] = float) -> list[Any] | None:
    """Return the numbers of "1,2", "[1, 2]", a number or a list; None for None.

    Args:
        x: Text, a number or a list.
        type (Callable[[Any], Any], default float): Makes a number.
    """
    if x is None:
        return None
    parts = x.strip("[]()").split(",") if isinstance(x, str) else x
    return [type(part) for part in (parts if isinstance(parts, list) else [parts])]


def eval_bool(x: Any, default: bool = False) -> bool:
    """Return whether a text says true, 1 or yes.

    Args:
        x: The text.
        default (bool, default False): For None.
    """
    return default if x is None else str(x).strip().lower() in ("true", "1", "yes")


def deprecation_warning(message: str, stacklevel: int = 3) -> None:
    """Warn.

    Args:
        message (str): The text.
        stacklevel (int, default 3): As that of warnings.warn.
    """
    warnings.warn(message, stacklevel=stacklevel)


def import_user_module(args: Any) -> None:
    """Import the package in args.user_dir, which registers tasks, models and the like.

    Its folder's name is the module's. Modules within its folders `tasks`, `models` and
    `criterions` are imported too. Where fairseq is not installed its names mean
    ctrainer's meanwhile, and from then on. A second call with the same folder does
    nothing.

    Args:
        args: user_dir as an attribute.

    Raises:
        FileNotFoundError: there is no such folder.
        ImportError: another module has the folder's name.
    """
    folder = getattr(args, "user_dir", None)
    if folder is None:
        return
    path = os.path.abspath(folder)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"--user-dir {folder}: there is no such folder")
    parent, name = os.path.split(path)
    loaded = sys.modules.get(name)
    if loaded is not None:
        where: list[str] = list(getattr(loaded, "__path__", []))
        if path in map(os.path.abspath, where):
            return
        raise ImportError(
            f"--user-dir {folder}: a module called {name!r} is imported already, from "
            f"{where or getattr(loaded, '__file__', 'nowhere')}; rename the folder"
        )
    _let_fairseq_mean_us()
    sys.path.insert(0, parent)
    try:
        importlib.import_module(name)
        for part in ("tasks", "models", "criterions"):
            _import_all(path, name, part)
    finally:
        sys.path.remove(parent)


def _let_fairseq_mean_us() -> None:
    from ctrainer.fairseq.aliases import install_fairseq_aliases

    if "fairseq" not in sys.modules and find_spec("fairseq") is None:
        install_fairseq_aliases()


def _import_all(path: str, name: str, part: str) -> None:
    """Import name.part.MODULE of each module in that folder, if there is one."""
    folder = os.path.join(path, part)
    if not os.path.isdir(folder):
        return
    for file in sorted(os.listdir(folder)):
        module, extension = os.path.splitext(file)
        if extension == ".py" and not module.startswith("_"):
            importlib.import_module(f"{name}.{part}.{module}")


def resolve_max_positions(*limits: Any) -> Any:
    """Return the least of limits. A number beside a tuple or a dict limits each of its
    entries.

    Args:
        *limits: None, numbers, tuples of them or dicts of them.
    """
    found = None
    for limit in limits:
        found = _least(found, limit)
    return found


def _least(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict) or isinstance(b, dict):
        of_a = a if isinstance(a, dict) else dict.fromkeys(b, a)
        of_b = b if isinstance(b, dict) else dict.fromkeys(a, b)
        return {k: _least(of_a.get(k), of_b.get(k)) for k in {**of_a, **of_b}}
    if isinstance(a, tuple | list) or isinstance(b, tuple | list):
        in_a = a if isinstance(a, tuple | list) else [a] * len(b)
        in_b = b if isinstance(b, tuple | list) else [b] * len(a)
        return tuple(map(_least, in_a, in_b))
    return min(a, b)
