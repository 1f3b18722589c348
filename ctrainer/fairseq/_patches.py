"""Attributes of other packages that are replaced, and given back."""

from __future__ import annotations

from typing import Any

_ABSENT: Any = object()


class Patches:
    """What was set on which object, and what had been there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value, which undo() takes back."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Give back everything, the latest first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
