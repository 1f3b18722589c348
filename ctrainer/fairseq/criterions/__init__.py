"""fairseq's criterions: what a loss is, and which of them there are by name."""

from __future__ import annotations

from typing import Any

from ctrainer.fairseq.criterions.fairseq_criterion import (
    FairseqCriterion,
    LegacyFairseqCriterion,
)
from ctrainer.fairseq.registry import Registry

__all__ = [
    "CRITERION_REGISTRY",
    "FairseqCriterion",
    "LegacyFairseqCriterion",
    "build_criterion",
    "register_criterion",
]

_registry = Registry("criterion", lambda: FairseqCriterion)
CRITERION_REGISTRY = _registry.classes
register_criterion = _registry.register


def build_criterion(cfg: Any, task: Any, from_checkpoint: bool = False) -> Any:
    """Return the criterion that a config names, made by its class's build_criterion().

    Args:
        cfg: Its options, with `_name`.
        task: The task.
        from_checkpoint (bool, default False): Not read.
    """
    cls: Any = _registry.find(_registry.name_in(cfg))
    return cls.build_criterion(_registry.complete(cfg), task)


# These register themselves.
from ctrainer.fairseq.criterions import (  # noqa: E402, F401
    cross_entropy,
    label_smoothed_cross_entropy,
)
