"""YAML: files in the layout of fairseq's Hydra configs, and overrides of options."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ctrainer.fairseq.config.root import COMPONENTS
from ctrainer.fairseq.config.trees import Tree, tree_of
from ctrainer.fairseq.config.values import as_lists

# YAML 1.1 takes 1e-3 for text, since it has no point; OmegaConf does not.
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")


@cache
def _yaml() -> Any:
    try:
        return import_module("yaml")
    except ImportError:
        raise ImportError("YAML configs need PyYAML: pip install pyyaml") from None


def _with_floats(base: type) -> Any:
    """A class of PyYAML to which 1e-3 is a number, when read and when quoting."""
    made: Any = type(f"_{base.__name__}", (base,), {})
    first = list("-+.0123456789")
    made.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, first)
    return made


@cache
def _loader() -> Any:
    made = _with_floats(_yaml().SafeLoader)
    made.add_constructor("tag:yaml.org,2002:map", _mapping)
    return made


def _mapping(loader: Any, node: Any) -> Any:
    """A mapping that has each of its keys once: YAML keeps the last of several."""
    written = [key for key, _ in node.value if not key.tag.endswith(":merge")]
    keys = [loader.construct_object(key, deep=True) for key in written]
    for place, key in enumerate(keys):
        if key in keys[:place]:
            raise _yaml().YAMLError(f"{key!r} stands there twice{node.start_mark}")
    found: dict[Any, Any] = {}
    yield found
    found.update(loader.construct_mapping(node))


@cache
def _dumper() -> Any:
    return _with_floats(_yaml().SafeDumper)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ValueError, naming `where`."""
    try:
        return _yaml().load(text, Loader=_loader())
    except _yaml().YAMLError as error:
        raise ValueError(f"{where} is not YAML: {error}") from error


def read_yaml(path: str | os.PathLike[str]) -> Tree:
    """The groups of a YAML file.

    A Hydra config's list `defaults` is followed: "group: name" reads name.yaml of the
    folder `group` beside the file, or without such a file names a component; what
    stands in the file itself wins. Its group `hydra` is the launcher's and not read.

    Raises OSError, and ValueError for what is not a mapping of groups.
    """
    path = Path(path)
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold groups of options, not {tree!r}")
    tree.pop("hydra", None)
    merged: Tree = {}
    for entry in tree.pop("defaults", None) or []:
        _merge(merged, _default(entry, path))
    _merge(merged, tree)
    return merged


def _default(entry: Any, path: Path) -> Tree:
    """What one entry of a list of defaults stands for."""
    if entry == "_self_":
        return {}
    if isinstance(entry, str):
        return read_yaml(path.with_name(entry).with_suffix(".yaml"))
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ValueError(f"{path}: defaults has {entry!r}; expected 'group: name'")
    ((group, name),) = entry.items()
    if name is None:
        return {}
    file = path.parent / group / f"{name}.yaml"
    if file.exists():
        return {group: read_yaml(file)}
    if group in COMPONENTS:
        return {group: {"_name": name}}
    raise ValueError(f"{path}: defaults names {group}: {name}, and there is no {file}")


def _merge(into: Tree, tree: Tree) -> None:
    """Put `tree` over `into`, group by group."""
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def override_tree(tree: Tree, override: str) -> None:
    """Apply "group.option=value"; the name of a component keeps its other options.

    Raises ValueError for what is not of that form.
    """
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"the override {override!r} is not group.option=value")
    value = parse_yaml(text, name)
    if len(keys) == 1 and keys[0] in COMPONENTS and isinstance(value, str):
        keys.append("_name")
    *groups, option = keys
    for group in groups:
        inner = tree.get(group)
        tree[group] = dict(inner) if isinstance(inner, dict) else {}
        if isinstance(inner, str) and group in COMPONENTS:
            tree[group]["_name"] = inner
        tree = tree[group]
    tree[option] = value


def to_yaml(config: Any) -> str:
    """The config as YAML, which `as_config` takes back from a file."""
    tree = as_lists(tree_of(config))
    return str(_yaml().dump(tree, Dumper=_dumper(), sort_keys=False))
