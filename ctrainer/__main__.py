"""`python -m ctrainer COMMAND`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

# Command: the module whose add_options() declares it, and what it does.
_COMMANDS = {
    "original": ("ctrainer.fairseq.original", "run a program of an installed fairseq"),
    "replay": ("ctrainer.fairseq.replay", "run the update of a crash.pt again"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command of the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ctrainer")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, purpose) in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        import_module(module).add_options(command)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
