"""References between options: "${group.option}" becomes that option's value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ctrainer.fairseq.config.values import is_reference

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")

Tree = dict[str, Any]


def referred_groups(tree: Tree) -> Iterator[str]:
    """The first names of the references in the values of a group."""
    for value in tree.values():
        if is_reference(value):
            yield from (found.split(".")[0] for found in _REFERENCE.findall(value))


def resolve(tree: Tree) -> Tree:
    """A copy of nested dicts and lists without references.

    Raises ValueError, which names the option, for a reference to an option that does
    not exist and for references in a circle.
    """
    return {key: resolve_group(tree, key) for key in tree}


def resolve_group(tree: Tree, group: str) -> Any:
    """The same for one group of the tree."""
    return _resolved(tree, tree[group], group, ())


def _resolved(tree: Tree, value: Any, where: str, trail: tuple[str, ...]) -> Any:
    """`value` of the option `where` without references; `trail`: those followed."""
    if isinstance(value, Mapping):
        return {
            key: _resolved(tree, item, f"{where}.{key}", trail)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_resolved(tree, item, where, trail) for item in value)
    if not is_reference(value):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole is None:
        raise ValueError(f"{where}: {value!r} cannot be read as a reference")
    target = whole[1]
    if target in (*trail, where):
        circle = " -> ".join((*trail, where, target))
        raise ValueError(f"{where}: references in a circle: {circle}")
    found: Any = tree
    for key in target.split("."):
        if not isinstance(found, Mapping) or key not in found:
            raise ValueError(f"{where}: {value} refers to no option")
        found = found[key]
    return _resolved(tree, found, target, (*trail, where))
