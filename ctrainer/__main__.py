"""`ctrainer COMMAND`, or `python -m ctrainer COMMAND`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from ctrainer import __version__

# Command: the module whose main(arguments) it is, and what it does.
COMMANDS = {
    "consolidate": (
        "ctrainer.fsdp.consolidate",
        "make one file, or other shards, of the shard files of FSDP",
    ),
    "demo": (
        "ctrainer.commands.demo",
        "fine-tune a small model that searches code, and ask it",
    ),
    "ds-to-universal": (
        "ctrainer.compat.deepspeed.ds_to_universal",
        "write a checkpoint of DeepSpeed as a universal one",
    ),
    "env": (
        "ctrainer.commands.environment",
        "print the versions and settings that a report of a bug needs",
    ),
    "fairseq-preprocess": (
        "ctrainer.fairseq.preprocess",
        "make dictionaries and binarised data of text",
    ),
    "fairseq-train": ("ctrainer.fairseq.train", "train a model of fairseq's kind"),
    "memory": (
        "ctrainer.fsdp.memory_plan",
        "print memory and traffic of a model that is trained on several GPUs",
    ),
    "original": ("ctrainer.fairseq.original", "run a program of an installed fairseq"),
    "replay": ("ctrainer.commands.replay", "run a failed update again"),
    "zero-to-fp32": (
        "ctrainer.compat.deepspeed.zero_to_fp32",
        "write the whole weights of a checkpoint of DeepSpeed",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command of the command line; return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="ctrainer", description="A trainer whose insides are C."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"ctrainer {__version__}",
        help="Print the version and exit.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    command = parser.parse_args(given[:1]).command
    status: int = import_module(COMMANDS[command][0]).main(given[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
