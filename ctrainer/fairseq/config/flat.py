"""Flat options, as argparse gives them, sorted into groups and components."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ctrainer.fairseq.config.components import component_class
from ctrainer.fairseq.config.root import COMPONENTS
from ctrainer.fairseq.config.trees import Tree, groups, nested_class, tree_of


def tree_of_flat(options: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """(the tree of groups, the options that belong nowhere, sorted).

    An option goes to each group that has it. A component without a dataclass takes all
    options, as in fairseq, so that then nothing is left.
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
            tree[component] = {**tree_of(dict(options)), "_name": name}
        else:
            tree[component] = {**_picked(cls, options, taken), "_name": name}
    empty = {key for key in COMPONENTS if options.get(key) is None}
    return tree, sorted(options.keys() - taken - empty)


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
