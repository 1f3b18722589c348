"""Help of the command line: each option's default beside its sentence."""

from __future__ import annotations

import argparse
from typing import Any


def with_default(text: str | None, default: Any) -> str:
    """Return the help of an option with its default.

    Args:
        text (str | None): The help; None is none.
        default: The value without the option.
    """
    words: dict[Any, str] = {None: "none", "": "none", False: "off", True: "on"}
    is_word = default is None or isinstance(default, bool | str)
    if isinstance(default, list | tuple):
        default = " ".join(map(str, default)) or "none"
    shown = words.get(default, default) if is_word else default
    return f"{text or ''} (default: {shown})".replace("%", "%%").lstrip()


class HelpFormatter(argparse.HelpFormatter):
    """A formatter of argparse that adds its default to the help of each option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        no_default = action.required or action.default is argparse.SUPPRESS
        if no_default or not action.option_strings:
            return action.help
        return with_default(action.help, action.default)
