"""Flat options, as argparse gives them, sorted into groups and components."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ctrainer.fairseq.config.base import MISSING
from ctrainer.fairseq.config.components import component_class, is_legacy
from ctrainer.fairseq.config.root import COMPONENTS
from ctrainer.fairseq.config.trees import (
    Tree,
    defaults_of,
    groups,
    nested_class,
    tree_of,
)


def tree_of_flat(options: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """(the tree of groups, the options that belong nowhere, sorted).

    An option goes to each group that has it. A component without a dataclass takes all
    options, as in fairseq, so that then nothing is left; one that is registered also
    those that are not given, by their defaults.
    """
    taken: set[str] = {"arch"}
    tree: Tree = {name: _picked(cls, options, taken) for name, cls in groups().items()}
    for component in COMPONENTS:
        name = options.get("arch" if component == "model" else component)
        if not isinstance(name, str):
            continue
        taken.add(component)
        cls = component_class(component, name)
        if cls is None:
            taken.update(options)
            others = _flat_defaults() if is_legacy(component, name) else {}
            tree[component] = {**others, **tree_of(dict(options)), "_name": name}
        else:
            tree[component] = {**_picked(cls, options, taken), "_name": name}
    empty = {key for key in COMPONENTS if options.get(key) is None}
    return tree, sorted(options.keys() - taken - empty)


def _flat_defaults() -> Tree:
    """The options of all groups by default; one of several groups as in the first."""
    tree: Tree = {}
    for cls in groups().values():
        tree = {**defaults_of(cls), **tree}
    return {name: value for name, value in tree.items() if value != MISSING}


def _picked(cls: type, options: Mapping[str, Any], taken: set[str]) -> Tree:
    """Those of `options` that `cls` has; those of groups within it are flat too."""
    tree: Tree = {}
    for option in dataclasses.fields(cls):
        inner = nested_class(cls, option.name)
        if inner is not None:
            tree[option.name] = _picked(inner, options, taken)
        elif option.name in options and option.name[:1] != "_":
            tree[option.name] = tree_of(options[option.name])
            taken.add(option.name)
    return tree
