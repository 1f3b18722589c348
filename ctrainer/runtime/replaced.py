"""Classes of transformers whose places ctrainer's have taken."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# By module and name; filled by patch_transformers().
classes: dict[tuple[str, str], type] = {}


def original(place: str, name: str) -> Any:
    """transformers' own class `name` of the module `place`, also where ctrainer's has
    taken its place. Raises ImportError without transformers."""
    return classes.get((place, name)) or getattr(import_module(place), name)
