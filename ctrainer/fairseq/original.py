"""`ctrainer original PROGRAM ...`: fairseq's own programs, with our Trainer.

PROGRAM is a module of fairseq_cli: train, preprocess, generate, validate and so on.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from ctrainer.fairseq._install import install
from ctrainer.fairseq.program_log import log_to_stdout
from ctrainer.runtime.command_line import HelpFormatter


def main(arguments: list[str]) -> int:
    """The command: run the program with the arguments that follow its name."""
    parser = argparse.ArgumentParser(
        prog="ctrainer original",
        description="Run a program of an installed fairseq with our Trainer.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--keep-trainer",
        action="store_true",
        help="Leave fairseq its own Trainer, to compare the two.",
    )
    parser.add_argument("program", help="Program, such as train or generate.")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="Its options, as in fairseq.",
    )
    options = parser.parse_args(arguments)
    if options.program != "generate":  # which logs beside its results
        # As the programs do before they import fairseq, of which some modules would
        # otherwise choose another form.
        log_to_stdout()
    install(trainer=not options.keep_trainer)
    program = import_module(f"fairseq_cli.{options.program}")
    sys.argv = [f"fairseq-{options.program}", *options.arguments]
    program.cli_main()
    return 0
