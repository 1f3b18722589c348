"""FairseqConfig out of anything that fairseq's configs come in."""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, Literal

from ctrainer.arguments.settings import hints
from ctrainer.fairseq.config.base import MISSING, OpenConfig
from ctrainer.fairseq.config.components import component_class
from ctrainer.fairseq.config.root import COMPONENTS, LEFT_OUT, FairseqConfig
from ctrainer.fairseq.config.trees import (
    Tree,
    defaults_of,
    groups,
    is_dict_config,
    nested_class,
    referred_groups,
    resolve,
    resolve_group,
    tree_of,
    tree_of_flat,
    unknown_option,
)
from ctrainer.fairseq.config.values import as_lists, convert

logger = logging.getLogger(__name__)

Unknown = Literal["error", "warn"]

_DEPRECATED = (
    "argparse.Namespace configuration is deprecated! Automatically converting to "
    "OmegaConf"
)


def as_config(source: Any = None, *, unknown: Unknown = "error") -> FairseqConfig:
    """Return a config that is complete, resolved and checked; `source` is left as it
    was.

    memory_efficient_fp16 and _bf16 set fp16 and bf16.

    Args:
        source (default None): A FairseqConfig or a dataclass like it, OmegaConf's
            DictConfig, a mapping of groups, an argparse.Namespace of flat options
            (which logs fairseq's warning), or None for the defaults.
        unknown (Unknown, default 'error'): What becomes of an option that is not known:
            "error", or "warn", which leaves it out and says so, once for all. A
            Namespace always warns, since programs keep options of their own in it.

    Raises:
        ValueError: an unknown option, with the near name; a value of the wrong type; a
            reference to nothing; an option of a component that must be given and is
            not; fp16 with tpu. The option is named.
        TypeError: a source of another kind.

    Example:
        >>> from ctrainer.fairseq import as_config
        >>> cfg = as_config({"optimization": {"lr": "0.1,0.05"}, "common": {"seed": 7}})
        >>> cfg.optimization.lr, cfg.common.seed
        ([0.1, 0.05], 7)
    """
    if isinstance(source, Namespace):
        logger.warning(_DEPRECATED)
        tree, left = tree_of_flat(vars(source))
        messages = [unknown_option(name, ()) for name in left]
    else:
        tree, messages = _nested(source), []
    config = _build(
        tree, _component_classes(source), messages if unknown == "warn" else None
    )
    if messages:
        logger.warning("options left out: %s", "; ".join(messages))
    return config


def _nested(source: Any) -> Tree:
    if source is None:
        return {}
    is_instance = dataclasses.is_dataclass(source) and not isinstance(source, type)
    if is_instance or is_dict_config(source) or isinstance(source, Mapping):
        tree: Tree = tree_of(source)
        return {name: tree[name] for name in tree if name not in LEFT_OUT}
    raise TypeError(
        "a config is a FairseqConfig, a DictConfig, a dict or a Namespace, not "
        f"{source!r}; load a YAML file by OmegaConf.load() or yaml.safe_load()"
    )


def _component_classes(source: Any) -> dict[str, type]:
    """The classes of components that are given as instances of dataclasses."""
    found = source if isinstance(source, Mapping) else getattr(source, "__dict__", {})
    return {
        component: type(found[component])
        for component in COMPONENTS
        if dataclasses.is_dataclass(found.get(component))
    }


def _build(
    tree: Tree, own_classes: dict[str, type], left_out: list[str] | None
) -> FairseqConfig:
    """The config of a tree of groups; unknown options are described in `left_out` or,
    where it is None, raised. `own_classes` are of components that no name is known of.
    """
    classes: dict[str, type | None] = {**groups()}
    full = {**defaults_of(FairseqConfig), **_known(FairseqConfig, tree, "", left_out)}
    for component in COMPONENTS:
        full[component], known = _component(component, full[component])
        classes[component] = known or own_classes.get(component)
    for name, cls in classes.items():
        if cls is not None:
            full[name] = _completed(cls, full[name], name, left_out)
    _imply(full["common"])
    full = resolve(full)
    values = {
        name: _instance(classes.get(name), value, name) for name, value in full.items()
    }
    _check_precision(values["common"])
    return FairseqConfig(**values)


def _known(cls: type, tree: Tree, where: str, left_out: list[str] | None) -> Tree:
    """`tree` without what `cls` does not have."""
    names = {option.name for option in dataclasses.fields(cls)}
    for key in tree.keys() - names:
        message = unknown_option(f"{where}{key}", names)
        if left_out is None:
            raise ValueError(message)
        left_out.append(message)
    return {key: value for key, value in tree.items() if key in names}


def _completed(cls: type, tree: Any, where: str, left_out: list[str] | None) -> Tree:
    """The options of a group with the defaults of those that are not given."""
    if tree is None:
        return defaults_of(cls)
    if not isinstance(tree, dict):
        raise ValueError(f"{where} must be a group of options, not {tree!r}")
    full = {**defaults_of(cls), **_known(cls, tree, f"{where}.", left_out)}
    for name in full:
        inner = nested_class(cls, name)
        if inner is not None:
            full[name] = _completed(inner, full[name], f"{where}.{name}", left_out)
    return full


def _component(component: str, value: Any) -> tuple[Any, type | None]:
    """The options of a component, and its dataclass where one is known."""
    if value is None or (isinstance(value, str) and value == MISSING):
        return value, None
    if isinstance(value, str):
        value = {"_name": value}
    if not isinstance(value, dict):
        raise ValueError(f"{component} must be a name or options, not {value!r}")
    name = value.get("_name")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{component}._name must be text or None, not {name!r}")
    return value, component_class(component, name)


def _imply(common: Tree) -> None:
    for kind in ("fp16", "bf16"):
        name = f"memory_efficient_{kind}"
        if convert(common[name], bool, f"common.{name}") is True:
            common[kind] = True


def _check_precision(common: Any) -> None:
    if common.fp16 and common.tpu:
        raise ValueError("Cannot combine --fp16 and --tpu, use --bf16 on TPUs")


def _instance(cls: type | None, value: Any, where: str) -> Any:
    """The group of that class, its options checked; without a class any options."""
    if cls is None:
        return OpenConfig(**value) if isinstance(value, dict) else value
    annotations = hints(cls)
    arguments = {}
    for name, item in value.items():
        inner = nested_class(cls, name)
        path = f"{where}.{name}"
        if isinstance(item, str) and item == MISSING:
            raise ValueError(f"{path} must be given")
        if inner is not None:
            arguments[name] = _instance(inner, item, path)
        else:
            arguments[name] = convert(item, annotations[name], path)
    return cls(**arguments)


def default_options(cls: type) -> dict[str, Any]:
    """Return the options of a dataclass with their defaults, references followed to the
    defaults of other groups; None for one that must be given.

    Args:
        cls (type): The dataclass of a group.
    """
    own = defaults_of(cls)
    others = {name: defaults_of(groups()[name]) for name in referred_groups(own)}
    resolved = resolve_group({**others, cls.__name__: own}, cls.__name__)
    return {
        name: None if value == MISSING else value
        for name, value in resolved.items()
        if name != "_name"
    }


def to_dict(config: Any) -> dict[str, Any]:
    """Return nested dicts of plain values, as a checkpoint's "cfg" holds them;
    `as_config` takes them back.

    Args:
        config: A FairseqConfig.
    """
    return dict(as_lists(tree_of(config)))


def checkpoint_config(state: Mapping[str, Any]) -> FairseqConfig:
    """Return the config of a checkpoint. Options that are not known any more are left
    out with a warning.

    Args:
        state (Mapping[str, Any]): The checkpoint's dictionary, with "cfg" or, of old
            ones, "args".

    Raises:
        ValueError: it has neither.
    """
    source = state.get("cfg") or state.get("args")
    if source is None:
        raise ValueError(
            "the checkpoint has neither cfg nor args; it holds "
            f"{', '.join(map(str, state)) or 'nothing'}"
        )
    return as_config(source, unknown="warn")
