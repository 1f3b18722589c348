"""The reader of settings: checks values by their annotations, and names.

TrainingArguments, BMUF, sharding, accelerate's settings and fairseq's groups are all
read here. A value has the type of its annotation; or is converted where nothing is
lost, such as '5e-5', which is text in YAML; or raises ValueError, which names the
setting, the expected type, and the value with its type.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

_LARGEST = sys.float_info.max
_TRUE = {"true", "yes", "on", "t", "y", "1"}
_FALSE = {"false", "no", "off", "f", "n", "0"}
_NOTHING = {"none", "null", "~"}  # None as text, for settings that are no text


@dataclass(frozen=True, slots=True)
class Range:
    """An interval such as "[0, 1)" in an annotation, a set such as "{4, 8, 32}", or
    some of these: "{-1} or [1, inf)". No NaN is in it."""

    text: str

    def __contains__(self, value: float) -> bool:
        return any(_is_within(value, part) for part in self.text.split(" or "))

    @property
    def words(self) -> str:
        return f"in {self.text}"


def _is_within(value: float, part: str) -> bool:
    numbers = [float(number) for number in part[1:-1].split(",")]
    if part[0] == "{":
        return value in numbers
    low, high = numbers
    above = value >= low if part[0] == "[" else value > low
    return above and (value <= high if part[-1] == "]" else value < high)


class Filled:
    """In the annotation of a list: it has an item."""

    words = "that is not empty"

    def __contains__(self, value: Sequence[Any]) -> bool:
        return len(value) > 0


Natural = Annotated[int, Range("[0, inf)")]
Count = Annotated[int, Range("[1, inf)")]
NotNegative = Annotated[float, Range("[0, inf)")]
Finite = Annotated[float, Range("(-inf, inf)")]
Positive = Annotated[float, Range("(0, inf)")]
Portion = Annotated[float, Range("[0, 1]")]
Fraction = Annotated[float, Range("[0, 1)")]
Seed = Annotated[int, Range("[0, 4294967295]")]  # NumPy's range

# ---- names

_FEW = 40  # names that a message may list


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known names, or all."""
    names = list(map(str, known))
    folded = {other.lower().replace("-", "_"): other for other in names}
    wanted = str(name).lower().replace("-", "_")
    wanted = {"lr": "learning_rate"}.get(wanted, wanted)
    words = set(wanted.split("_"))  # of batch_size, which many longer names have
    near = [other for other in folded if words <= set(other.split("_"))][:2]
    near = near or difflib.get_close_matches(wanted, folded, n=2, cutoff=0.65)
    if near:
        return f"did you mean {' or '.join(repr(folded[n]) for n in near)}?"
    few = len(names) <= _FEW
    return f"there is {', '.join(names) or 'none'}" if few else "no name is near it"


@cache
def _keywords(function: Any) -> list[str] | None:
    """The keywords that a function takes; None: any."""
    found = inspect.signature(function).parameters.values()
    names = [p.name for p in found if p.kind is not p.VAR_POSITIONAL]
    names = [name for name in names if name != "self"]
    return None if any(p.kind is p.VAR_KEYWORD for p in found) else names


def reject_keywords(name_of: str, function: Any, given: Iterable[str]) -> None:
    """Raise TypeError for a keyword that a function, by the name that users know, does
    not take, with the nearest that it takes."""
    known = _keywords(function)
    for name in given:
        if known is not None and name not in known:
            raise TypeError(
                f"{name_of}() got an unexpected keyword argument {name!r}; "
                f"{nearest(name, known)}"
            )


def reject_unknown(where: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Raise ValueError for the first of `given` that is not among `known`."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ValueError(f"{where} has no {name!r}; {nearest(name, known)}")


DEEPEST = 100  # levels of a configuration


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises ValueError naming `where` for invalid JSON, for
    a name that an object has twice, where json would keep the last, and for a value of
    more than DEEPEST levels."""
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    return json_value(found, where)


def json_value(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a value of JSON's kinds, its mappings as dicts. Raises ValueError
    naming `where` for another kind, and for more than DEEPEST levels."""
    if depth > DEEPEST:
        raise ValueError(f"{where} is nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        inner = {k: f"{where}.{k}" if depth < 3 else where for k in value}
        return {k: json_value(v, inner[k], depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = (json_value(item, where, depth + 1) for item in value)
        return list(items) if isinstance(value, list) else tuple(items)
    value = plain(value)
    if value is None or isinstance(value, str | Real | os.PathLike):
        return value
    raise ValueError(f"{where}={value!r} ({type(value).__name__}) is no value of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice")
    return found


# ---- annotations


@cache
def hints(cls: type) -> dict[str, Any]:
    """The annotations of a dataclass, with their ranges. Raises TypeError for an
    annotation that cannot be resolved."""
    try:
        return get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise TypeError(f"{cls.__qualname__}: {error} in its annotations") from error


def without_none(hint: Any) -> tuple[Any, bool]:
    """(the annotation without None, whether None was allowed).

    str beside an enumeration stands for its words and is left out, too.
    """
    if get_origin(hint) not in (Union, UnionType):
        return hint, hint is Any
    optional = NoneType in get_args(hint)
    words = any(isinstance(a, type) and issubclass(a, Enum) for a in get_args(hint))
    leaves = (NoneType, str) if words else (NoneType,)
    rest = [arg for arg in get_args(hint) if arg not in leaves]
    return rest[0] if len(rest) == 1 else Union[tuple(rest)], optional  # noqa: UP007


def choices_of(hint: Any) -> tuple[Any, ...] | None:
    """The words that an annotation allows, or None where it is not of that kind."""
    hint, _ = without_none(hint)
    if get_origin(hint) is Literal:
        return get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(str(member.value) for member in hint)
    return None


def plain(value: Any) -> Any:
    """Members of enumerations as their values, NumPy's scalars and tensors of no
    dimension as Python's, in containers too."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


# ---- values


class Mismatch(Exception):
    """The value is not of the kind."""


class Reader:
    """Reads values by annotations; subclasses add a package's own notations.

    A truth value is also one of the words true, yes, on, t, y and their opposites, or 1
    and 0; a number also its text, and a whole number also a float that is one. None is
    also written none, null or ~ where no text is allowed. A truth value is no number,
    a number is no text, and one value is no list.
    """

    def read(self, value: Any, hint: Any, where: str) -> Any:
        """`value`, converted by `hint`. Raises ValueError naming `where`."""
        try:
            return self._read(plain(value), hint, where)
        except Mismatch:
            raise ValueError(mismatch(value, hint, where)) from None

    def _read(self, value: Any, hint: Any, where: str) -> Any:
        kind, optional = without_none(hint)
        if kind is Any:
            return self.anything(value)
        if optional and (value is None or self._says_nothing(value, kind)):
            return None
        if get_origin(kind) is Annotated:
            kind, span = get_args(kind)
            value = self._read(value, kind, where)
            if value not in span:
                raise Mismatch
            return value
        if choices_of(kind) is not None:
            return self.choice(value, kind, where)
        if get_origin(kind) in (Union, UnionType):
            return self.union(value, kind, where)
        if _bare(kind) in _KINDS:
            method, _ = _KINDS[_bare(kind)]
            return getattr(self, method)(value, kind, where)
        if not isinstance(kind, type):
            raise TypeError(f"{where} is annotated {kind}, which cannot be checked")
        if not isinstance(value, kind):
            raise Mismatch
        return value

    def anything(self, value: Any) -> Any:
        return value

    def _says_nothing(self, value: Any, kind: Any) -> bool:
        is_word = isinstance(value, str) and value.lower() in _NOTHING
        return is_word and not {str, Any} & set(get_args(kind) or (kind,))

    def truth(self, value: Any, kind: Any, where: str) -> bool:
        text = str(value).lower()
        if not isinstance(value, (bool, int, str)) or text not in _TRUE | _FALSE:
            raise Mismatch
        return text in _TRUE

    def whole(self, value: Any, kind: Any, where: str) -> int:
        if isinstance(value, str):
            value = _number(value)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise Mismatch
        if not isinstance(value, Integral) and float(value) % 1 != 0:  # NaN, inf too
            raise Mismatch
        if not -(2**63) <= value < 2**63:  # type: ignore[operator]  # what C holds
            raise Mismatch
        return int(value)  # type: ignore[call-overload, no-any-return]

    def number(self, value: Any, kind: Any, where: str) -> float:
        """An int stays an int: 500 steps are not 500.0."""
        if isinstance(value, str):
            value = _number(value)
        if isinstance(value, bool) or not isinstance(value, Real) or value != value:
            raise Mismatch
        if _LARGEST < abs(value) < math.inf:  # type: ignore[operator]
            raise Mismatch
        return int(value) if isinstance(value, Integral) else float(value)

    def text(self, value: Any, kind: Any, where: str) -> str:
        if not isinstance(value, (str, os.PathLike)):
            raise Mismatch
        return os.fspath(value)

    def choice(self, value: Any, kind: Any, where: str) -> Any:
        choices = choices_of(kind) or ()
        if value is False and "no" in choices:  # YAML's reading of the word
            value = "no"
        for word in choices:
            written = isinstance(value, str) and value == str(word)
            if written or (type(value) is type(word) and value == word):
                return kind(word) if isinstance(kind, type) else word
        raise Mismatch

    def items(self, value: Any) -> Sequence[Any]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise Mismatch
        return value

    def sequence(self, value: Any, kind: Any, where: str) -> list[Any]:
        (item,) = get_args(kind) or (Any,)
        return [
            self.read(part, item, f"{where}[{i}]")
            for i, part in enumerate(self.items(value))
        ]

    def pieces(self, value: Any, kind: Any, where: str) -> tuple[Any, ...]:
        parts, wanted = self.items(value), get_args(kind)
        if wanted[1:] == (...,):
            wanted = wanted[:1] * len(parts)
        if len(parts) != len(wanted) and wanted:
            raise Mismatch
        each = zip(parts, wanted or (Any,) * len(parts), strict=True)
        return tuple(
            self.read(part, item, f"{where}[{i}]")
            for i, (part, item) in enumerate(each)
        )

    def mapping(self, value: Any, kind: Any, where: str) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise Mismatch
        _, item = get_args(kind) or (Any, Any)
        return {k: self.read(part, item, f"{where}.{k}") for k, part in value.items()}

    def union(self, value: Any, kind: Any, where: str) -> Any:
        """The first member that accepts the value; members of the value's type come
        before members that convert."""
        members = get_args(kind)
        for member in sorted(members, key=lambda m: type(value) is not _bare(m)):
            try:
                return self._read(value, member, where)
            except Mismatch:
                continue
        raise Mismatch


def _bare(hint: Any) -> Any:
    return get_origin(hint) or hint


def _number(text: str) -> float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise Mismatch


# The reader's method for a type, and the type in words.
_KINDS = {
    bool: ("truth", "true or false"),
    int: ("whole", "a whole number"),
    float: ("number", "a number"),
    str: ("text", "text"),
    list: ("sequence", "a list"),
    tuple: ("pieces", "a list"),
    dict: ("mapping", "a dict"),
}


def mismatch(value: Any, hint: Any, where: str) -> str:
    """The sentence about a value that an annotation does not allow."""
    sentence = f"{where} must be {describe(hint)}, not {value!r}"
    choices = [word for word in choices_of(hint) or () if isinstance(word, str)]
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{sentence} ({type(value).__name__}){meant}"


def describe(hint: Any) -> str:
    """What an annotation allows, in words."""
    kind, optional = without_none(hint)
    if optional and kind is not Any:
        return f"{describe(kind)} or None"
    if get_origin(kind) is Annotated:
        inner, span = get_args(kind)
        return f"{'a value' if inner is Any else describe(inner)} {span.words}"
    choices = choices_of(kind)
    if choices is not None:
        return f"one of {', '.join(map(str, choices))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(describe, get_args(kind)))
    if kind is Any:
        return "anything"
    if _bare(kind) not in _KINDS:
        return f"a {getattr(kind, '__name__', kind)}"
    _, word = _KINDS[_bare(kind)]
    args = [arg for arg in get_args(kind) if arg not in (Any, ...)]
    if word != "a list" or not args:
        return word
    count = f"{len(args)} " if get_origin(kind) is tuple and len(args) > 1 else ""
    bare, span = (
        get_args(args[0]) if get_origin(args[0]) is Annotated else (args[0], None)
    )
    item = {int: "whole numbers", float: "numbers", str: "texts"}.get(bare)
    within = f" {span.words}" if span else ""
    return f"a list of {count}{item}{within}" if item else "a list"


# ---- groups of settings

_READER = Reader()
_Options = TypeVar("_Options")


def read(value: Any, hint: Any, where: str) -> Any:
    """`value`, converted by `hint`. Raises ValueError naming `where`."""
    return _READER.read(value, hint, where)


def read_keywords(
    function: Callable[..., Any], given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Keywords for `function`: truth values and numbers, or lists of these, where its
    defaults are, and numbers where it has none. Raises ValueError naming the keyword.
    """
    known = dict(inspect.signature(function).parameters)
    known.pop("optimizer", None)  # the caller's own
    reject_unknown(where, given, known)
    kinds = {bool: bool, int: float | list[float], float: float | list[float]}
    kinds[type(inspect.Parameter.empty)] = float
    return {
        name: read(value, kinds.get(type(known[name].default), Any), f"{where}: {name}")
        for name, value in given.items()
    }


def read_options(cls: type[_Options], source: Any, where: str) -> _Options:
    """The dataclass `cls` of the settings that `source` has; others by default.

    Every name of a mapping has to be known, except `_name`, the name of its group; from
    a Namespace, a dataclass or another object only the names of `cls` are read.

    Raises ValueError naming the setting; TypeError for a source without settings.
    """
    assert is_dataclass(cls)
    known = [field.name for field in fields(cls)]
    if isinstance(source, Mapping):
        reject_unknown(where, (n for n in source if n != "_name"), known)
        given = {name: source[name] for name in known if name in source}
    elif isinstance(source, (type, Real, str, bytes, Sequence, NoneType)):
        raise TypeError(
            f"{where} is a dict or an object with attributes such as {known[0]}, not "
            f"{source!r} ({type(source).__name__})"
        )
    else:
        given = {n: getattr(source, n) for n in known if hasattr(source, n)}
    kinds = hints(cls)
    return cls(**{n: read(v, kinds[n], f"{where}: {n}") for n, v in given.items()})
