"""fairseq's module names for our modules: where fairseq is not installed, tasks and
criterions written for it then log into our metrics and use our configuration."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

_OURS = {
    "fairseq.dataclass": "ctrainer.fairseq.config",
    "fairseq.dataclass.configs": "ctrainer.fairseq.config",
    "fairseq.logging.meters": "ctrainer.fairseq.meters",
    "fairseq.logging.metrics": "ctrainer.fairseq.metrics",
    "fairseq.logging.progress_bar": "ctrainer.fairseq.progress_bar",
    # The older names, which fairseq keeps up too:
    "fairseq.meters": "ctrainer.fairseq.meters",
    "fairseq.metrics": "ctrainer.fairseq.metrics",
    "fairseq.progress_bar": "ctrainer.fairseq.progress_bar",
}


def install_fairseq_aliases() -> None:
    """Make `fairseq.logging.metrics`, `.meters` and `.progress_bar` name our modules,
    and `fairseq.dataclass` our configuration.

    Installs nothing but these, under their older names too, and the empty packages
    above them; a second call changes nothing. Raises RuntimeError where fairseq is
    installed or loaded: two sets of metrics under one name would each miss half of
    what is logged.
    """
    if sys.modules.get("fairseq") is _package("fairseq"):
        return
    if "fairseq" in sys.modules or find_spec("fairseq") is not None:
        raise RuntimeError(
            "fairseq is installed, so its modules keep their names; uninstall it, or "
            "import ctrainer.fairseq.metrics under its own name"
        )
    for name in ("fairseq", "fairseq.logging"):
        sys.modules[name] = _package(name)
    for name, ours in _OURS.items():
        sys.modules[name] = import_module(ours)
    _link()


def remove_fairseq_aliases() -> None:
    """Undo `install_fairseq_aliases`; what was imported meanwhile goes on working."""
    if sys.modules.get("fairseq") is _package("fairseq"):
        for name in ("fairseq", "fairseq.logging", *_OURS):
            sys.modules.pop(name, None)


_packages: dict[str, ModuleType] = {}


def _package(name: str) -> ModuleType:
    """The empty package of that name, the same at each call."""
    if name not in _packages:
        package = ModuleType(name, "Names for modules of ctrainer.fairseq.")
        package.__path__ = []
        _packages[name] = package
    return _packages[name]


def _link() -> None:
    """Make the modules attributes of the packages above them, as importing does."""
    for name in ("fairseq.logging", *_OURS):
        parent, _, child = name.rpartition(".")
        if parent in _packages:
            setattr(_packages[parent], child, sys.modules[name])
