"""TensorBoard's writer, from torch or from tensorboardX."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def summary_writer_class() -> Any:
    """SummaryWriter of torch.utils.tensorboard, or else of tensorboardX.

    Raises ImportError, saying what to install, where there is neither.
    """
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return import_module(module).SummaryWriter
        except ImportError:
            continue
    raise ImportError(
        "logging for TensorBoard needs tensorboard or tensorboardX: "
        "pip install tensorboard"
    )
