"""`ctrainer replay CRASH`: the update that failed, once more."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import Any

from ctrainer.runtime.command_line import HelpFormatter


def main(arguments: list[str]) -> int:
    """The command; 0 when the failure was found again."""
    parser = argparse.ArgumentParser(
        prog="ctrainer replay",
        description="Run a failed update again: of a Trainer's folder crash, or of a "
        "crash.pt of fairseq's.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("crash", help="Folder or file that a failed update has left.")
    parser.add_argument(
        "--setup",
        metavar="MODULE:FUNCTION",
        help="Function that is called with the run's arguments or config, as dicts, "
        "and returns its Trainer, of one worker. It is needed for models that are not "
        "transformers', and for Trainers of fairseq's that fairseq-train has not made.",
    )
    options = parser.parse_args(arguments)
    of_folder = os.path.isdir(options.crash)
    name = "ctrainer.trainer.crash" if of_folder else "ctrainer.fairseq.replay"
    setup = None if options.setup is None else _setup(options.setup)
    status: int = import_module(name).run_again(options.crash, setup)
    return status


def _setup(name: str) -> Any:
    module, _, function = name.partition(":")
    if not function:
        raise SystemExit(f"--setup is {name!r}; expected MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    return getattr(import_module(module), function)
