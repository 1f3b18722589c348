"""install(): fairseq's own programs with our Trainer."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ctrainer.fairseq import _cures as cures
from ctrainer.fairseq._patches import Patches

__all__ = ["install", "uninstall"]

logger = logging.getLogger("ctrainer.fairseq.install")


class _Installation:
    """What has been done, in lines, and how to undo it."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.cured: list[str] = []
        self.replaced: list[str] = []

    def cure(self) -> None:
        if not self.cured:
            self.cured = [
                cures.cure_dataclasses(self.patches),
                cures.cure_numpy(self.patches, import_module("numpy")),
                _allow_namespaces(),
            ]

    def replace(self) -> None:
        if not self.replaced:
            self.replaced = [
                cures.use_own_metrics(),
                _replace_trainer(self.patches),
                _replace_amp(self.patches),
                cures.cure_bf16(self.patches, import_module("fairseq.options")),
            ]

    def undo(self) -> None:
        self.patches.undo()
        self.cured, self.replaced = [], []


_installation = _Installation()


def install(trainer: bool = True) -> list[str]:
    """Make an installed fairseq 0.12 import, and train with ctrainer.fairseq.Trainer,
    or a subclass of it that knows the optimizers and schedules registered there.

    To be called before fairseq is imported, whose tasks then log into our metrics.
    `fairseq_cli.train.main(cfg)` and everything else that names fairseq's Trainer gets
    ours; its model-parallel Trainer keeps the original as its base.

    trainer: False cures fairseq and leaves its Trainer and its metrics.

    A second call does what the first has left. Returns what was done, a line each, and
    logs it.

    Raises:
        ImportError: there is no fairseq, or it does not import for another reason;
            everything is then as before.
    """
    if "fairseq" not in sys.modules and find_spec("fairseq") is None:
        raise ImportError(
            "fairseq is not installed, so there is nothing to install into; "
            "docs/fairseq_package.md says how to get it, and ctrainer.fairseq.Trainer "
            "does without"
        )
    before = len(_lines())
    try:
        _installation.cure()
        if trainer:
            _installation.replace()
    except BaseException:
        _installation.undo()
        raise
    for line in _lines()[before:]:
        logger.info(line)
    return _lines()


def _lines() -> list[str]:
    return [*_installation.cured, *_installation.replaced]


def uninstall() -> None:
    """Give back fairseq's Trainer and what else was replaced, except its metrics,
    which those that have imported them go on using."""
    _installation.undo()


def _allow_namespaces() -> str:
    from ctrainer.adapters.torch_fairseq import allow_namespaces

    allow_namespaces()
    return "torch.load makes argparse.Namespace"


def _replace_trainer(patches: Patches) -> str:
    from ctrainer.fairseq._guest import Trainer

    return _replace(patches, import_module("fairseq.trainer").Trainer, Trainer)


def _replace_amp(patches: Patches) -> str:
    """fairseq's tasks use autocast where the optimizer is its AMPOptimizer."""
    from ctrainer.fairseq.optim import AMPOptimizer

    task = import_module("fairseq.tasks.fairseq_task")
    patches.set(task, "AMPOptimizer", (task.AMPOptimizer, AMPOptimizer))
    return "fairseq's tasks know our AMPOptimizer"


def _replace(patches: Patches, theirs: type, ours: type) -> str:
    """Put ours in each loaded module that has theirs under its name: a program has
    bound the name when it was imported."""
    name = theirs.__name__
    changed = []
    for module in list(sys.modules.values()):
        if _attribute(module, name) is theirs:
            patches.set(module, name, ours)
            changed.append(module.__name__)
    return f"{name} is ctrainer's in {', '.join(sorted(changed))}"


def _attribute(module: Any, name: str) -> Any:
    """What a module has of that name already; asking others would load theirs."""
    return getattr(module, "__dict__", {}).get(name)
