"""Values of options: checked against the annotation, converted where nothing is lost.

Text is read as OmegaConf and the command line do, so that `lr: 1e-3`, which YAML takes
for text, is a number, and "1,2" a list of two.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ctrainer.fairseq.config.base import MISSING

_TRUE = {"true", "yes", "on", "y", "1"}
_FALSE = {"false", "no", "off", "n", "0"}


@cache
def hints(cls: type) -> dict[str, Any]:
    """The annotations of a dataclass, as types. Raises TypeError where one means
    nothing."""
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise TypeError(f"{cls.__qualname__}: {error} in its annotations") from error


def without_none(hint: Any) -> tuple[Any, bool]:
    """(the annotation without None, whether None was allowed)."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, hint is Any
    rest = [arg for arg in get_args(hint) if arg is not NoneType]
    optional = len(rest) < len(get_args(hint))
    return rest[0] if len(rest) == 1 else Union[tuple(rest)], optional  # noqa: UP007


def choices_of(hint: Any) -> tuple[str, ...] | None:
    """The strings that an annotation allows, or None where it is not of that kind."""
    hint, _ = without_none(hint)
    if get_origin(hint) is Literal:
        return get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(str(member.value) for member in hint)
    return None


def is_reference(value: Any) -> bool:
    """Whether it is a text such as "${common.seed}"."""
    return isinstance(value, str) and "${" in value


def plain(value: Any) -> Any:
    """Enumeration members as their values, in containers too."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


def as_lists(value: Any) -> Any:
    """Tuples as lists, in containers too: YAML and OmegaConf have nothing else."""
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    return value


def convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` wants it.

    None passes where the annotation has it; references and "???" always. Raises
    ValueError, which names `where`, what is expected and what was given.
    """
    value = plain(value)
    kind, optional = without_none(hint)
    if is_reference(value) or (isinstance(value, str) and value == MISSING):
        return value
    if kind is Any:
        return as_lists(value)
    if value is None and optional:
        return None
    try:
        return _converter(kind)(value, kind, where)
    except _Mismatch:
        expected = describe(kind) + (" or None" if optional else "")
        raise ValueError(f"{where} must be {expected}, not {value!r}") from None


class _Mismatch(Exception):
    """The value is not of the kind."""


def _to_bool(value: Any, kind: Any, where: str) -> bool:
    text = str(value).lower()
    if not isinstance(value, (bool, int, str)) or text not in _TRUE | _FALSE:
        raise _Mismatch
    return text in _TRUE


def _to_int(value: Any, kind: Any, where: str) -> int:
    if isinstance(value, str):
        value = _parsed(value, int)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _Mismatch
    if float(value) % 1 != 0:  # NaN and infinity too
        raise _Mismatch
    return int(value)  # type: ignore[call-overload, no-any-return]


def _to_float(value: Any, kind: Any, where: str) -> float:
    if isinstance(value, str):
        value = _parsed(value, float)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _Mismatch
    return float(value)


def _parsed(text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise _Mismatch from None


def _to_str(value: Any, kind: Any, where: str) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _Mismatch
    return str(value)


def _to_choice(value: Any, kind: Any, where: str) -> str:
    if value not in (choices_of(kind) or ()):
        raise _Mismatch
    return str(value)


def _items(value: Any) -> Sequence[Any]:
    """The items of a list, of its text such as "1,2" or "[1, 2]", or of one value."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value) if value else []
        except (SyntaxError, ValueError):
            value = [part.strip() for part in value.split(",")]
    if value is None or isinstance(value, Mapping):
        raise _Mismatch
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value
    return [value]


def _to_list(value: Any, kind: Any, where: str) -> list[Any]:
    (item,) = get_args(kind) or (Any,)
    return [
        convert(part, item, f"{where}[{i}]") for i, part in enumerate(_items(value))
    ]


def _to_tuple(value: Any, kind: Any, where: str) -> tuple[Any, ...]:
    parts, wanted = _items(value), get_args(kind)
    if wanted[1:] == (...,):
        wanted = wanted[:1] * len(parts)
    if len(parts) != len(wanted) and wanted:
        raise _Mismatch
    each = zip(parts, wanted or (Any,) * len(parts), strict=True)
    return tuple(
        convert(part, item, f"{where}[{i}]") for i, (part, item) in enumerate(each)
    )


def _to_dict(value: Any, kind: Any, where: str) -> dict[Any, Any]:
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise _Mismatch from None
    if not isinstance(value, Mapping):
        raise _Mismatch
    _, item = get_args(kind) or (Any, Any)
    return {key: convert(part, item, f"{where}.{key}") for key, part in value.items()}


def _to_union(value: Any, kind: Any, where: str) -> Any:
    for member in get_args(kind):
        try:
            return _converter(member)(value, member, where)
        except _Mismatch:
            continue
    raise _Mismatch


def _to_instance(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(kind, type):
        raise TypeError(f"{where} is annotated {kind}, which cannot be checked")
    if not isinstance(value, kind):
        raise _Mismatch
    return value


_Converter = Callable[[Any, Any, str], Any]
_CONVERTERS: dict[Any, tuple[_Converter, str]] = {
    bool: (_to_bool, "true or false"),
    int: (_to_int, "a whole number"),
    float: (_to_float, "a number"),
    str: (_to_str, "text"),
    list: (_to_list, "a list"),
    tuple: (_to_tuple, "a list"),
    dict: (_to_dict, "a dict"),
}


def _converter(kind: Any) -> _Converter:
    if choices_of(kind) is not None:
        return _to_choice
    if get_origin(kind) in (Union, UnionType):
        return _to_union
    found = _CONVERTERS.get(get_origin(kind) or kind)
    return found[0] if found else _to_instance


def describe(hint: Any) -> str:
    """What an annotation allows, in words."""
    kind, optional = without_none(hint)
    if optional and kind is not Any:
        return f"{describe(kind)} or None"
    choices = choices_of(kind)
    if choices is not None:
        return f"one of {', '.join(choices)}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(describe, get_args(kind)))
    if kind is Any:
        return "anything"
    found = _CONVERTERS.get(get_origin(kind) or kind)
    if found is None:
        return f"a {getattr(kind, '__name__', kind)}"
    args = [arg for arg in get_args(kind) if arg not in (Any, ...)]
    if found[1] != "a list" or not args:
        return found[1]
    count = f"{len(args)} " if get_origin(kind) is tuple and len(args) > 1 else ""
    item = {int: "whole numbers", float: "numbers", str: "texts"}.get(args[0])
    return f"a list of {count}{item}" if item else "a list"
