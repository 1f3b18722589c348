"""fairseq's names for our modules: where fairseq is not installed, what was written for
it, such as a --user-dir, imports ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Loader(Loader):
    """Gives a module that is loaded already, and leaves it as it is."""

    def __init__(self, ours: str) -> None:
        self._module = import_module(ours)
        self._spec = self._module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which importing has just replaced


class _Finder(MetaPathFinder):
    """Finds fairseq.X where there is a ctrainer.fairseq.X."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "fairseq":
            return None
        ours = f"ctrainer.{fullname}"
        if find_spec(ours) is None:
            return None
        spec = ModuleSpec(fullname, _Loader(ours))
        _name_children(ours)
        return spec


_finder = _Finder()


def _name_children(ours: str) -> None:
    """Give fairseq's names to the modules below, as far as they are loaded: not all of
    them are files."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{ours}."):
            sys.modules.setdefault(name.partition(".")[2], module)


def install_fairseq_aliases() -> None:
    """Make `fairseq` name ctrainer's modules.

    fairseq.tasks, fairseq.logging.metrics and so on are ctrainer.fairseq.tasks,
    ctrainer.fairseq.metrics and so on, each module one object under both names. A
    module is loaded when it is imported; a second call changes nothing.

    Raises:
        RuntimeError: fairseq is installed or loaded: two sets of metrics under one name
            would each miss half of what is logged.

    Example:
        >>> from ctrainer.fairseq import install_fairseq_aliases
        >>> install_fairseq_aliases()  # doctest: +SKIP
    """
    if _finder in sys.meta_path:
        return
    if "fairseq" in sys.modules or find_spec("fairseq") is not None:
        raise RuntimeError(
            "fairseq is installed, so its modules keep their names; uninstall it, or "
            "import ctrainer.fairseq.metrics under its own name"
        )
    # Before the finder of files, which would find ours below a package of ours that is
    # named fairseq.X, and run them a second time.
    sys.meta_path.insert(0, _finder)


def remove_fairseq_aliases() -> None:
    """Undo `install_fairseq_aliases`; modules imported meanwhile keep working."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "fairseq"]:
            del sys.modules[name]
