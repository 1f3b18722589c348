"""Args sections composed from tables at the time that `__doc__` is read.

A table is the help of a dataclass's fields, or the descriptions that several classes
share; docs/ makes its pages of the same fields. At import a class costs one object:
annotations are resolved, and the text is made, for those who ask.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, NamedTuple, get_args

from ctrainer.arguments.settings import choices_of, describe, hints

WIDTH = 84  # help() indents by four
_SECTION = re.compile(r"\n\n(?=(?:Args|Returns|Raises|Example|Source)\b[^\n]*:)")
_ENTRY = re.compile(
    r"^    (\*{0,2}\w+)(?: \((?:.|\n {5,})*?\))?:\s((?:.*\n?)(?: {5,}.*\n?)*)", re.M
)


class Argument(NamedTuple):
    """An argument, with what its values are and its default as source text."""

    name: str
    values: str
    default: str
    text: str

    def documented(self, own: Mapping[str, str]) -> Argument:
        """With the text that the class's own docstring has, where it has one."""
        return self._replace(text=own.get(self.name, self.text))

    def __str__(self) -> str:
        default = f"default {self.default}" if self.default else ""
        details = ", ".join(filter(None, (self.values, default)))
        head = f"{self.name} ({details})" if details else self.name
        return textwrap.fill(
            f"{head}: {self.text}", WIDTH, initial_indent=" " * 4,
            subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


Arguments = Callable[[], Iterable[Argument]]


class ComposedDoc:
    """A class's docstring in its `__dict__`, which `__doc__` asks for the text."""

    def __init__(self, text: str, arguments: Arguments, example: str) -> None:
        self._text = text
        self._arguments = arguments
        self._example = example

    def __get__(self, instance: object, owner: type | None = None) -> str:
        head, *sections = _SECTION.split(inspect.cleandoc(self._text))
        own = next((s for s in sections if s.startswith("Args:")), "")
        texts = {name: " ".join(text.split()) for name, text in _ENTRY.findall(own)}
        lines = [str(a.documented(texts)) for a in self._arguments()]
        rest = [s for s in sections if s is not own]
        args = ["Args:\n" + "\n".join(lines)] if lines else []
        example = [self._example] if self._example and ">>>" not in self._text else []
        return "\n\n".join([head, *args, *rest, *example])


def compose(cls: type, arguments: Arguments, example: str = "") -> None:
    """Let the docstring of a class list `arguments`, and end with `example` where it
    has none of its own. -OO has stripped docstrings, and nothing is composed."""
    text = vars(cls).get("__doc__")
    if isinstance(text, str) and sys.flags.optimize < 2:
        doc: Any = ComposedDoc(text, arguments, example)
        cls.__doc__ = doc


def default_of(option: Field[Any]) -> str:
    """The default of a field as source text."""
    factory: Any = option.default_factory
    if factory is MISSING:
        return repr(option.default)
    if isinstance(factory, type) and is_dataclass(factory):
        return f"{factory.__name__}()"
    return option.metadata.get("default_text") or repr(factory())


def values_of(option: Field[Any], hint: Any) -> str:
    """What a value of a field has to be; of many words their number."""
    words = option.metadata.get("choices") or next(
        filter(None, map(choices_of, get_args(hint))), ()
    )
    if len(words) > 12:
        return f"one of {len(words)} words"
    if words:
        return "one of " + ", ".join(map(str, words))
    return "" if hint is Any else describe(hint)


def options(cls: type) -> Iterator[Argument]:
    """The fields of a dataclass of fairseq's configuration, by their annotations."""
    for option in fields(cls):
        hint, default = hints(cls)[option.name], default_of(option)
        is_group = isinstance(hint, type) and is_dataclass(hint)
        values = hint.__name__ if is_group else describe(hint)
        text = option.metadata.get("help", "")
        if option.name == "_name":
            text = "Name of the component that the options are of."
        elif is_group:
            text = f"The options of {option.name}."
        elif not text and default.startswith("'${"):
            text = f"Takes the value of {default[3:-2]}."
        yield Argument(option.name, values, default, text)


def parameters(cls: type, shared: Mapping[str, str]) -> Iterator[Argument]:
    """The parameters of a constructor, whose texts are in `shared` or the docstring."""
    for name, parameter in inspect.signature(cls).parameters.items():
        empty = parameter.empty
        values = "" if parameter.annotation is empty else str(parameter.annotation)
        default = "" if parameter.default is empty else repr(parameter.default)
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        yield Argument(stars + name, values, default, shared.get(name, ""))
