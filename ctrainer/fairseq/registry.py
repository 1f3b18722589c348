"""Classes by name: how fairseq's tasks, models and criterions find each other, and the
config their options. Source: fairseq, registry.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any, TypeVar

from ctrainer.fairseq.config.command_line import add_options
from ctrainer.fairseq.config.components import (
    component_class,
    register_component,
    register_legacy_options,
)

C = TypeVar("C", bound=type)


class Registered:
    """The base of tasks, models and criterions: their options on a command line."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Declare the options of the class's dataclass, where it has one.

        Args:
            parser: An ArgumentParser, or a group of one.
        """
        dataclass = getattr(cls, "__dataclass", None)
        if dataclass is not None:
            add_options(parser, dataclass)


class Registry:
    """The classes of one component: subclasses of `base`, registered by name."""

    def __init__(self, component: str, base: Callable[[], type]) -> None:
        self.component = component
        self.classes: dict[str, type] = {}
        self._base = base

    def register(self, name: str, dataclass: type | None = None) -> Callable[[C], C]:
        """Return a decorator that lets a name mean a class.

        Args:
            name (str): The name.
            dataclass (type | None, default None): Its options; None: those that its
                add_args(parser) declares.

        Raises:
            ValueError: a name that is taken, or a class of another kind.
        """

        def keep(cls: C) -> C:
            kind = self.component
            if name in self.classes:
                raise ValueError(f"Cannot register duplicate {kind} ({name})")
            if not issubclass(cls, self._base()):
                raise ValueError(
                    f"{kind.capitalize()} ({name}: {cls.__name__}) must extend "
                    f"{self._base().__name__}"
                )
            if dataclass is not None:
                register_component(kind, name, dataclass)
            else:
                register_legacy_options(kind, name, getattr(cls, "add_args", None))
            self.classes[name] = cls
            setattr(cls, "__dataclass", dataclass)
            return cls

        return keep

    def find(self, name: Any) -> type:
        """The class of that name. Raises ValueError with those that there are."""
        if name not in self.classes:
            raise ValueError(
                f"{self.component} {name!r} is not registered; there are "
                f"{', '.join(sorted(self.classes))}. A class of your own is found when "
                "--user-dir names the folder that registers it"
            )
        return self.classes[name]

    def name_in(self, cfg: Any) -> Any:
        """The name that a config of the component, flat options or a text give."""
        if isinstance(cfg, str):
            return cfg
        return getattr(cfg, "_name", None) or getattr(cfg, self.component, None)

    def complete(self, cfg: Any) -> Any:
        """The config as the component's dataclass, where it has one and this is flat
        options of all groups or a name."""
        cls: Any = component_class(self.component, self.name_in(cfg))
        if cls is None or isinstance(cfg, cls):
            return cfg
        if isinstance(cfg, str):
            return cls()
        return cls.from_namespace(cfg) if isinstance(cfg, Namespace) else cfg
