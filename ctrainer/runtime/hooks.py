"""What an overridden hook accepts."""

import inspect
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any
from weakref import WeakKeyDictionary

_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


_accepted: WeakKeyDictionary[Any, frozenset[str] | None] = WeakKeyDictionary()


def takes_positional(function: Callable[..., Any], n: int) -> bool:
    """Can `function` be called with n positional arguments?"""
    try:
        inspect.signature(function).bind(*range(n))
    except TypeError:
        return False
    except ValueError:  # no signature to ask
        return True
    return True


def accepted_keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names that `function` takes as keywords; None when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in _KEYWORD)


def call_adapted(method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call an overridden hook with those of the keywords that it takes."""
    if isinstance(method, BuiltinMethodType):  # of ours, which take every keyword
        return method(*args, **keywords)
    function = getattr(method, "__func__", method)
    try:
        if function not in _accepted:
            _accepted[function] = accepted_keywords(function)
        taken = _accepted[function]
    except TypeError:  # nothing that a dictionary can remember
        taken = accepted_keywords(function)
    return method(
        *args, **{k: v for k, v in keywords.items() if taken is None or k in taken}
    )
