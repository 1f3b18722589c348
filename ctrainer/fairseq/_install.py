"""install(): fairseq's own programs with our Trainer."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Attributes of other packages that are replaced, and restored.


_ABSENT: Any = object()


class Patches:
    """What was set on which object, and what had been there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value, which undo() takes back."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore everything, the latest first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


# What keeps fairseq 0.12 from today's Python and libraries, cured from outside.
#
# fairseq was last released in 2022. Each function removes one obstacle, through Patches
# that can be undone, and says in a line what it did.


# Packages whose dataclasses have instances of dataclasses as defaults.
_PACKAGES = ("fairseq", "fairseq_cli", "hydra")
_CONFIG = "FairseqDataclass"


def _made_for_python_310(cls: type) -> bool:
    return cls.__module__.split(".")[0] in _PACKAGES or any(
        base.__name__ == _CONFIG for base in cls.__mro__
    )


def cure_dataclasses(patches: Patches) -> str:
    """Let fairseq's configs be defaults of fields.

    From Python 3.11 on a default has to be hashable, and a dataclass that compares its
    fields is not. A default_factory would not do: fairseq reads the defaults of fields.
    So the configs get the hash of objects; what others define is rejected as before.
    """
    original = dataclasses.dataclass

    def hashable(cls: type) -> type:
        if cls.__hash__ is None and _made_for_python_310(cls):
            cls.__hash__ = object.__hash__
        return cls

    @functools.wraps(original)
    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        if cls is None:
            return lambda later: hashable(original(**options)(later))
        return hashable(original(cls, **options))

    patches.set(dataclasses, "dataclass", dataclass)
    return "configs may be defaults of dataclass fields, as before Python 3.11"


def cure_numpy(patches: Patches, numpy: ModuleType) -> str:
    """Restore the names of Python's types that NumPy 1.24 dropped."""
    kinds = {"float": float, "int": int, "object": object, "complex": complex}
    missing = [name for name in kinds if name not in vars(numpy)]
    for name in missing:
        patches.set(numpy, name, kinds[name])
    return f"numpy has {', '.join(missing) or 'all its names'} again"


def cure_bf16(patches: Patches, options: ModuleType) -> str:
    """Let --bf16 mean what it says where there is no TPU.

    options: fairseq.options, which takes --bf16 for a wish for a TPU.
    """
    if find_spec("torch_xla") is not None:
        return "--bf16 stays a wish for a TPU: torch_xla is installed"
    parse = options.parse_args_and_arch

    @functools.wraps(parse)
    def parse_args_and_arch(*args: Any, **keywords: Any) -> Any:
        made = parse(*args, **keywords)
        given = [*sys.argv[1:], *(keywords.get("input_args") or ())]
        for found in made if isinstance(made, tuple) else (made,):
            if getattr(found, "bf16", False) and "--tpu" not in given:
                found.tpu = False
        return made

    patches.set(options, "parse_args_and_arch", parse_args_and_arch)
    return "--bf16 is no wish for a TPU"


def use_own_metrics() -> str:
    """Give fairseq our meters and metrics, if it has not loaded its own.

    Its aggregators keep 98 bytes of each update for ever, and stay active when an
    exception passes.
    """
    ours = {
        f"fairseq.logging.{name}": import_module(f"ctrainer.fairseq.{name}")
        for name in ("meters", "metrics")
    }
    if "fairseq" in sys.modules and any(
        sys.modules.get(name) is not module for name, module in ours.items()
    ):
        return "fairseq had been imported before and logs into its own metrics"
    sys.modules.update(ours)
    try:
        package = import_module("fairseq.logging")
    except BaseException:
        for name in ours:
            sys.modules.pop(name, None)
        raise
    for name, module in ours.items():
        setattr(package, name.rpartition(".")[2], module)
    return "fairseq logs into ctrainer.fairseq.metrics"


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
                cure_dataclasses(self.patches),
                cure_numpy(self.patches, import_module("numpy")),
                _allow_namespaces(),
            ]

    def replace(self) -> None:
        if not self.replaced:
            self.replaced = [
                use_own_metrics(),
                _replace_trainer(self.patches),
                _replace_amp(self.patches),
                cure_bf16(self.patches, import_module("fairseq.options")),
            ]

    def undo(self) -> None:
        self.patches.undo()
        self.cured, self.replaced = [], []


_installation = _Installation()


def install(trainer: bool = True) -> list[str]:
    """Make an installed fairseq 0.12 import, and train with ctrainer.fairseq.Trainer.

    It is a subclass of that Trainer that knows the optimizers and schedules registered
    there. To be called before fairseq is imported, whose tasks then log into ctrainer's
    metrics. `fairseq_cli.train.main(cfg)` and everything else that names fairseq's
    Trainer gets ctrainer's; its model-parallel Trainer keeps the original as its base.
    A second call does what the first has left.

    Args:
        trainer (bool, default True): False mends fairseq and leaves its Trainer and its
            metrics.

    Returns:
        What was done, a line each, which is logged too.

    Raises:
        ImportError: there is no fairseq, or it does not import for another reason;
            everything is then as before.

    Example:
        >>> from ctrainer.fairseq import install
        >>> lines = install()  # doctest: +SKIP
    """
    if "fairseq" not in sys.modules and find_spec("fairseq") is None:
        raise ImportError(
            "fairseq is not installed, so there is nothing to install into; "
            "docs/start/from_fairseq.md says how to get it, and "
            "ctrainer.fairseq.Trainer does without"
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
    """Undo install(), except for the metrics, which those that have imported them keep.

    Example:
        >>> from ctrainer.fairseq import uninstall
        >>> uninstall()
    """
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
