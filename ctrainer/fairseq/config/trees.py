"""Configs of any kind as nested dicts by name, which is what they are built from."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ctrainer.arguments.settings import hints, plain
from ctrainer.fairseq.config.base import OpenConfig
from ctrainer.fairseq.config.root import FairseqConfig

Tree = dict[str, Any]


def is_dict_config(value: object) -> bool:
    """Whether it is one of OmegaConf's containers, which we never import ourselves."""
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
            tree[option.name] = "???"
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
