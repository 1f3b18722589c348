"""fairseq's tasks: what a task is, and which of them there are by name."""

from __future__ import annotations

from typing import Any

from ctrainer.fairseq.registry import Registry
from ctrainer.fairseq.tasks.fairseq_task import (
    FairseqTask,
    LegacyFairseqTask,
    StatefulContainer,
)

__all__ = [
    "TASK_REGISTRY",
    "FairseqTask",
    "LegacyFairseqTask",
    "StatefulContainer",
    "get_task",
    "register_task",
    "setup_task",
]

_registry = Registry("task", lambda: FairseqTask)
TASK_REGISTRY = _registry.classes
register_task = _registry.register


def setup_task(cfg: Any, **kwargs: Any) -> Any:
    """Return the task that a config names, made by its class's setup_task().

    Args:
        cfg: The task's config, with `_name`.
        **kwargs: Of setup_task().
    """
    cls: Any = _registry.find(_registry.name_in(cfg))
    return cls.setup_task(_registry.complete(cfg), **kwargs)


def get_task(name: str) -> Any:
    """Return the class of a task.

    Args:
        name (str): Of the task.
    """
    return _registry.find(name)


# These register themselves.
from ctrainer.fairseq.tasks import (  # noqa: E402, F401
    language_modeling,
    translation,
)
