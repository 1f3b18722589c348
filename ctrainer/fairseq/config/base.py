"""The parts of fairseq's config dataclasses: options with help, defaults that refer
to other options, and reading by key as well as by attribute."""

from __future__ import annotations

import ast
import dataclasses
from argparse import Namespace
from collections.abc import ItemsView, KeysView, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import SimpleNamespace
from typing import Annotated, Any, cast

from ctrainer.arguments.settings import Filled, NotNegative, Range

MISSING = "???"  # the value of an option that has to be given


OrOff = Annotated[int, Range("[-1, inf)")]  # -1, and mostly 0, is never
CodeBits = Annotated[int, Range("{4, 8, 32}")]
LearningRates = Annotated[list[NotNegative], Filled()]


@dataclass(frozen=True, slots=True)
class Pair:
    """In an annotation: two numbers within a range, or their text as "(0.9, 0.98)"."""

    text: str

    @property
    def words(self) -> str:
        return f"of two numbers in {self.text}, such as (0.9, 0.98)"

    def __contains__(self, value: Any) -> bool:
        try:
            parts = ast.literal_eval(value) if isinstance(value, str) else value
            first, second = (float(part) for part in parts)
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            return False
        span = Range(self.text)
        return first in span and second in span


def II(reference: str) -> Any:
    """Return a default that takes the value of another option.

    Args:
        reference (str): The other option, such as "common.seed".
    """
    return "${" + reference + "}"


def setting(cfg: Any, group: str, name: str, default: Any = None) -> Any:
    """An option of a config, the default where the group or the option is missing."""
    return getattr(getattr(cfg, group, None), name, default)


def opt(default: Any, text: str, **metadata: Any) -> Any:
    """Return an option with its help, for a dataclass.

    Args:
        default: The value, a list, which each instance copies, or a function that makes
            it.
        text (str): The help.
        **metadata: argparse_alias, a second spelling; argparse_const, the value of an
            option that is given without one; default_text, the default of a function in
            the docs.
    """
    details = {"help": text, **metadata}
    if callable(default):
        return field(default_factory=default, metadata=details)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=details)
    return field(default=default, metadata=details)


def ChoiceEnum(choices: Sequence[str]) -> type[Enum]:
    """Return an enumeration of strings that equal their members, for dataclasses
    written for fairseq; ctrainer's say Literal.

    Args:
        choices (Sequence[str]): The strings.
    """
    make: Any = StrEnum
    return cast(type[Enum], make("Choices", {choice: choice for choice in choices}))


class Readable:
    """Attributes that are keys too, as in OmegaConf's DictConfig."""

    def keys(self) -> KeysView[str]:
        """Return the names of the attributes."""
        return vars(self).keys()

    def items(self) -> ItemsView[str, Any]:
        """Return names and values of the attributes."""
        return vars(self).items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute, or the default where there is none.

        Args:
            key (str): Its name.
            default (default None): The default.
        """
        return vars(self).get(key, default)

    def __contains__(self, key: str) -> bool:
        return key in vars(self)

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)


class OpenConfig(Readable, SimpleNamespace):
    """The options of a component whose dataclass is not known: any names.

    Example:
        >>> from ctrainer.fairseq.config import OpenConfig
        >>> OpenConfig(beam=5)["beam"]
        5
    """


@dataclass
class FairseqDataclass(Readable):
    """The base of all groups of options. Attributes are keys, too.

    Args:
        _name (str | None, default None): Name of the component that the options are of;
            None in groups of no component.

    Example:
        >>> from dataclasses import dataclass
        >>> from ctrainer.fairseq.config import FairseqDataclass, opt
        >>> @dataclass
        ... class MyConfig(FairseqDataclass):
        ...     depth: int = opt(6, "Layers.")
        >>> MyConfig()["depth"]
        6
    """

    _name: str | None = None

    @staticmethod
    def name() -> str | None:
        """Return the name of the component, for classes that have one."""
        return None

    @classmethod
    def from_namespace(cls, args: Namespace | FairseqDataclass) -> Any:
        """Return an instance with the values that `args` has of its options; others by
        default.

        Args:
            args (Namespace | FairseqDataclass): Options as attributes.
        """
        if isinstance(args, cls):
            return args
        names = [f.name for f in dataclasses.fields(cls) if f.name[:1] != "_"]
        given = {name: getattr(args, name) for name in names if hasattr(args, name)}
        return cls(**given)
