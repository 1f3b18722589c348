"""What an overridden hook accepts."""

import inspect
from collections.abc import Callable
from typing import Any

_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
