"""Configs of any kind as nested dicts by name, which is what they are built from: of
groups, of references between options, of a command line's flat options."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ctrainer.arguments.settings import hints, plain
from ctrainer.fairseq.config.base import MISSING, OpenConfig
from ctrainer.fairseq.config.components import component_class, is_legacy
from ctrainer.fairseq.config.root import COMPONENTS, FairseqConfig
from ctrainer.fairseq.config.values import is_reference

Tree = dict[str, Any]


def is_dict_config(value: object) -> bool:
    """Is the value a container of OmegaConf, which this package never imports?"""
    return type(value).__module__.split(".")[0] == "omegaconf"


def tree_of(value: Any) -> Any:
    """Nested dicts for dataclasses, namespaces, mappings and OmegaConf's containers,
    whose references are followed; anything else as it is."""
    if is_dict_config(value):
        omegaconf = sys.modules["omegaconf"]
        return tree_of(
            omegaconf.OmegaConf.to_container(value, resolve=True, enum_to_str=True)
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: tree_of(item) for key, item in vars(value).items()}
    if isinstance(value, (Namespace, OpenConfig)):
        return {key: tree_of(item) for key, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {str(key): tree_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(tree_of, value))
    return plain(value)


def defaults_of(cls: type) -> Tree:
    """The options of a dataclass with their defaults; those without one, "???"."""
    tree: Tree = {}
    for option in dataclasses.fields(cls):
        if option.default_factory is not dataclasses.MISSING:
            tree[option.name] = tree_of(option.default_factory())
        elif option.default is not dataclasses.MISSING:
            tree[option.name] = tree_of(option.default)
        else:
            tree[option.name] = MISSING
    return tree


def groups() -> dict[str, type]:
    """The groups of FairseqConfig that have a class of their own."""
    found = {name: nested_class(FairseqConfig, name) for name in hints(FairseqConfig)}
    return {name: cls for name, cls in found.items() if cls is not None}


def nested_class(cls: type, name: str) -> type | None:
    """The class of an option that is a group itself, or None."""
    hint = hints(cls).get(name)
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def known_options() -> Iterator[str]:
    """Every option of the groups, as "group.option"."""
    for group, cls in groups().items():
        for option in dataclasses.fields(cls):
            yield f"{group}.{option.name}"


def unknown_option(where: str, known: Iterable[str]) -> str:
    """A sentence about `where`, an option that is not known, with what may be meant:
    the nearest of its group, or else those of nearly that name elsewhere."""
    prefix, _, name = where.rpartition(".")
    dot = f"{prefix}." if prefix else ""
    found = [dot + near for near in difflib.get_close_matches(name, list(known))]
    if not found:
        leaves = {other: other.rpartition(".")[2] for other in known_options()}
        near = difflib.get_close_matches(name, set(leaves.values()), n=1, cutoff=0.8)
        found = [other for other, leaf in leaves.items() if leaf in near]
    meant = f"; did you mean {' or '.join(found)}?" if found else ""
    return f"there is no option {where}{meant}"


# References between options: "${group.option}" becomes that option's value.

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


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
    """One group of the tree without references, as resolve()."""
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


# The options of an argparse.Namespace, which has no groups.


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
    """The options of a class, and of the groups within it, which are flat too."""
    tree: Tree = {}
    for option in dataclasses.fields(cls):
        inner = nested_class(cls, option.name)
        if inner is not None:
            tree[option.name] = _picked(inner, options, taken)
        elif option.name in options and option.name[:1] != "_":
            tree[option.name] = tree_of(options[option.name])
            taken.add(option.name)
    return tree
