"""The command line: options spelt as fairseq spells them, made of the dataclasses.

Only what is given is kept, so that every default comes from the dataclasses.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn

from ctrainer.arguments.settings import choices_of, hints, without_none
from ctrainer.fairseq.config.base import MISSING
from ctrainer.fairseq.config.build import as_config
from ctrainer.fairseq.config.common import CommonConfig, EMAConfig, FairseqBMUFConfig
from ctrainer.fairseq.config.components import (
    complete_architecture,
    component_class,
    component_names,
    legacy_options,
)
from ctrainer.fairseq.config.data import (
    CheckpointConfig,
    DatasetConfig,
    OptimizationConfig,
)
from ctrainer.fairseq.config.distributed import DistributedTrainingConfig
from ctrainer.fairseq.config.root import COMPONENTS, FairseqConfig
from ctrainer.fairseq.config.trees import nested_class, tree_of_flat
from ctrainer.fairseq.config.values import convert, is_reference
from ctrainer.runtime.command_line import with_default

# The default components of a program that trains, as in fairseq.
_CHOSEN = {
    "task": "translation",
    "criterion": "cross_entropy",
    "lr_scheduler": "fixed",
}
_GROUPS = {
    "dataset_data_loading": DatasetConfig,
    "distributed_training": DistributedTrainingConfig,
    "optimization": OptimizationConfig,
    "checkpoint": CheckpointConfig,
    "ema": EMAConfig,
}

Adder = argparse._ActionsContainer


def add_options(parser: Adder, cls: type) -> None:
    """Add the options of a dataclass, those of groups within it too.

    "data" is positional; a truth value is a flag that turns the default round; a list
    is written 1,2. An option that the parser has already stays as it is, and one that
    only refers to another has no spelling of its own.

    Args:
        parser (Adder): An ArgumentParser, or a group of one.
        cls (type): The dataclass.
    """
    for option in fields(cls):
        inner = nested_class(cls, option.name)
        if inner is not None:
            add_options(parser, inner)
        elif option.name != "_name" and not only_refers(option):
            _add(parser, option, hints(cls)[option.name])


def only_refers(option: Field[Any]) -> bool:
    """Whether an option takes the value of another and has no help of its own."""
    return is_reference(option.default) and "help" not in option.metadata


def spellings(option: Field[Any]) -> list[str]:
    """How an option is written on the command line."""
    if option.name == "data":
        return ["data"]
    alias = option.metadata.get("argparse_alias")
    return [f"--{option.name.replace('_', '-')}", *([alias] if alias else [])]


def _add(parser: Adder, option: Field[Any], hint: Any) -> None:
    names = spellings(option)
    taken = parser._option_string_actions
    if names[0] in taken:
        return
    names = [name for name in names if name not in taken]
    parser.add_argument(*names, **_details(option, hint))


def _details(option: Field[Any], hint: Any) -> dict[str, Any]:
    """The keywords of add_argument."""
    details: dict[str, Any] = {"default": SUPPRESS, "help": _help(option)}
    if without_none(hint)[0] is bool:
        if is_reference(option.default):  # a flag that can also be turned off
            return {
                **details,
                "nargs": "?",
                "const": True,
                "type": _reader(option.name, hint),
            }
        details["action"] = "store_false" if option.default is True else "store_true"
        return details
    if option.name != "data":
        details["required"] = option.default == MISSING
    details["choices"] = choices_of(hint)
    details["type"] = _reader(option.name, hint)
    details["metavar"] = None if details["choices"] else option.name.upper()
    if "argparse_const" in option.metadata:
        details.update(const=option.metadata["argparse_const"], nargs="?")
    return details


def _help(option: Field[Any]) -> str | None:
    """The help of an option, with its default unless the option is required."""
    text: str | None = option.metadata.get("help")
    if option.default == MISSING or option.name == "data":
        return text
    default: Any = option.default
    if callable(option.default_factory):
        default = option.metadata.get("default_text") or option.default_factory()
    if is_reference(default):
        default = f"that of {default[2:-1]}"
    return with_default(text, default)


def _reader(name: str, hint: Any) -> Callable[[str], Any]:
    """Reads the text of an option; its errors name it."""

    def read(text: str) -> Any:
        if choices_of(hint):
            return text  # argparse compares, and lists the choices
        try:
            return convert(text, hint, name)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return read


class _Parser(ArgumentParser):
    """Says which option may be meant by one that it does not know."""

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        parts = []
        for text in unknown:
            name = text.split("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            is_option = name[:1] == "-" and near
            parts.append(f"{text} (did you mean {near[0]}?)" if is_option else text)
        self.error(f"unrecognized arguments: {' '.join(parts)}")


def training_parser(**chosen: str | None) -> _Parser:
    """Return the parser of a program that trains, without the components' own options.

    Args:
        **chosen (str | None): Components in place of a translation task, cross_entropy
            and a fixed schedule, by group; None is none.
    """
    parser = _Parser(
        usage="%(prog)s [options] [data]",
        allow_abbrev=False,
        argument_default=SUPPRESS,
    )
    add_options(parser, CommonConfig)
    for component in COMPONENTS:
        names = component_names(component)
        is_model = component == "model"
        default = {**_CHOSEN, **chosen}.get(component)
        parser.add_argument(
            *(["--arch", "-a"] if is_model else [f"--{component.replace('_', '-')}"]),
            default=default or SUPPRESS,
            choices=names or None,
            metavar="NAME",
            help=with_default(
                f"Name of the {component}: {', '.join(names) or 'any'}.", default
            ),
        )
    for title, cls in _GROUPS.items():
        add_options(parser.add_argument_group(title), cls)
    return parser


def parse_training_args(
    argv: Sequence[str] | None = None,
    *,
    modify_parser: Callable[[ArgumentParser], None] | None = None,
    **chosen: str | None,
) -> FairseqConfig:
    """Return the config of a command line.

    Read twice, as in fairseq: first for the names of the components, then with their
    options; those of bmuf exist with --use-bmuf. An error, which names the option and
    what may be meant, ends the program with status 2, as argparse does.

    Args:
        argv (Sequence[str] | None, default None): The command line; None: this
            process's.
        modify_parser (Callable[[ArgumentParser], None] | None, default None): Called
            with the parser before each reading.
        **chosen (str | None): As training_parser's.

    Example:
        >>> from ctrainer.fairseq import parse_training_args
        >>> cfg = parse_training_args(["data-bin", "--max-tokens", "4000", "--arch",
        ...     "transformer", "--optimizer", "adam", "--cpu"])
        >>> cfg.dataset.max_tokens
        4000
    """
    parser = training_parser(**chosen)
    if modify_parser is not None:
        modify_parser(parser)
    first, _ = parser.parse_known_args(_without_help(argv))
    for component in COMPONENTS:
        _add_component(parser, component, _name_of(component, first))
    if getattr(first, "use_bmuf", False):
        add_options(parser.add_argument_group("bmuf"), FairseqBMUFConfig)
    if modify_parser is not None:
        modify_parser(parser)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.reject(unknown)
    return _config(parser, options)


def _add_component(parser: ArgumentParser, component: str, name: str | None) -> None:
    """The options of a component: of its dataclass, or those its class declares."""
    cls = component_class(component, name)
    add_args = legacy_options(component, name)
    if cls is None and add_args is None:
        return
    group = parser.add_argument_group(component, argument_default=SUPPRESS)
    if cls is not None:
        add_options(group, cls)
    elif add_args is not None:
        add_args(group)


def _without_help(argv: Sequence[str] | None) -> list[str]:
    """The arguments without those that print help: not all options are known yet."""
    given = sys.argv[1:] if argv is None else argv
    return [text for text in given if text not in ("-h", "--help")]


def _name_of(component: str, options: Namespace) -> str | None:
    return getattr(options, "arch" if component == "model" else component, None)


def _config(parser: ArgumentParser, options: Namespace) -> FairseqConfig:
    complete_architecture(options)
    tree, left = tree_of_flat(vars(options))
    if left:
        parser.error(f"no group and no component has {', '.join(left)}")
    try:
        return as_config(tree)
    except ValueError as error:
        parser.error(str(error))
