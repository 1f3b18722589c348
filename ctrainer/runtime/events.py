"""What a callback's method does with an event: nothing, or which keywords it takes."""

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from ctrainer.runtime.hooks import accepted_keywords


def _documented() -> None:
    """Nothing but a docstring."""


def _bare() -> None:
    pass


_EMPTY = [_documented.__code__, _bare.__code__]


def _same_body(code: CodeType, empty: CodeType) -> bool:
    consts = code.co_consts
    return (
        code.co_code == empty.co_code
        and len(consts) == len(empty.co_consts)
        and consts[-1:] in ((), (None,))
    )


def is_empty(function: Callable[..., Any]) -> bool:
    """Has the function no statement? The empty methods of a base class, ours or
    transformers' or the user's, are distinguished from overrides by that alone."""
    if not isinstance(function, FunctionType):
        return False
    return any(_same_body(function.__code__, empty) for empty in _EMPTY)


def wanted(function: Callable[..., Any]) -> bool | tuple[frozenset[str], bool]:
    """False: never call it. True: call it with every keyword. Else the keywords that
    its signature names, and whether it takes others too."""
    if is_empty(function):
        return False
    names = accepted_keywords(function)
    if names is not None:
        return names, False
    code = getattr(function, "__code__", None)
    if code is not None and "tokenizer" in named_parameters(code):
        return frozenset({"tokenizer"}), True
    return True


def named_parameters(code: CodeType) -> tuple[str, ...]:
    """Names of the parameters, without those of *args and **kwargs."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
