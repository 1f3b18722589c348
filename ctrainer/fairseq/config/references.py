"""References between options: "${group.option}" becomes that option's value.

As OmegaConf has them: with leading dots relative to the group, "oc.env:NAME" or
"oc.env:NAME,default" for the environment; the whole value keeps the type of what it
refers to, a part of a text becomes text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ctrainer.fairseq.config.values import is_reference

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_ENVIRONMENT = re.compile(r"(?:oc\.)?env:([^,]+)(?:,(.*))?$", re.DOTALL)

Tree = dict[str, Any]


def referred_groups(tree: Tree) -> Iterator[str]:
    """The first names of the references in the values of a group."""
    for value in tree.values():
        if is_reference(value):
            yield from (found.split(".")[0] for found in _REFERENCE.findall(value))


def resolve(tree: Tree) -> Tree:
    """A copy of nested dicts and lists without references.

    Raises ValueError, which names the option, for a reference to what is not there and
    for references in a circle.
    """
    return {key: resolve_group(tree, key) for key in tree}


def resolve_group(tree: Tree, group: str) -> Any:
    """The same for one group of the tree."""
    return _resolved(tree, tree[group], (group,), ())


def _resolved(
    tree: Tree, value: Any, path: tuple[str, ...], trail: tuple[str, ...]
) -> Any:
    """`value`, which is at `path`, without references; `trail` are those followed."""
    if isinstance(value, Mapping):
        return {
            key: _resolved(tree, item, (*path, str(key)), trail)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = (_resolved(tree, item, path, trail) for item in value)
        return type(value)(items)
    if not is_reference(value):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _value_of(tree, whole[1].strip(), path, trail)
    text = _REFERENCE.sub(
        lambda found: str(_value_of(tree, found[1].strip(), path, trail)), value
    )
    if is_reference(text):
        raise ValueError(f"{'.'.join(path)}: {value!r} cannot be read as a reference")
    return text


def _value_of(
    tree: Tree, reference: str, path: tuple[str, ...], trail: tuple[str, ...]
) -> Any:
    where = ".".join(path)
    environment = _ENVIRONMENT.match(reference)
    if environment:
        return _from_environment(environment[1].strip(), environment[2], where)
    target = _target(reference, path)
    name = ".".join(target)
    if name in (*trail, where):
        circle = " -> ".join((*trail, where, name))
        raise ValueError(f"{where}: references in a circle: {circle}")
    found: Any = tree
    for key in target:
        if not isinstance(found, Mapping) or key not in found:
            raise ValueError(f"{where}: ${{{reference}}} refers to no option")
        found = found[key]
    return _resolved(tree, found, target, (*trail, where))


def _target(reference: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path that is meant; each leading dot goes up from the option once."""
    name = reference.lstrip(".")
    ups = len(reference) - len(name)
    base = path[: max(len(path) - ups, 0)] if ups else ()
    return (*base, *name.split("."))


def _from_environment(name: str, default: str | None, where: str) -> str:
    value = os.environ.get(name, default)
    if value is None:
        raise ValueError(f"{where}: the environment has no variable {name}")
    return value.strip()
