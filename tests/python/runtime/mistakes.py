"""Typical mistakes, what an error has to say of each, and the rules that score it.

A mistake is a function that makes one and does not catch what is raised. It is entered
with the argument, hook or file to be named, the value or type to be shown and, where
the user's own code runs, the name of the function whose line has to be found.

python -m tests.python.runtime.mistakes    the score; writes the golden messages
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GOLDEN = Path(__file__).with_suffix(".txt")
HERE = Path(__file__).parent
# What says what to do: an imperative, or what would be right.
ADVICE = re.compile(
    r"\b((?<!data )set|pass|give|return|(?<!annot )use|call|choose|add|load|leave|let"
    r"|make|compare|rename|compute|train|expected|expects|must|needs?|has to|one of"
    r"|may be|between|instead|wrap|did you mean|at least|known|remedy)\b",
    re.IGNORECASE,
)
RULES = ("names", "shows", "says", "frame")


@dataclass(frozen=True)
class Mistake:
    make: Callable[[], object]
    names: str
    shows: str
    user: str | None

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def file(self) -> str:
        return self.make.__code__.co_filename


ALL: list[Mistake] = []


def mistake(
    names: str, shows: str, user: str | None = None
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """names, shows: text of the message. user: the user's function at fault."""

    def enter(make: Callable[[], object]) -> Callable[[], object]:
        ALL.append(Mistake(make, names, shows, user))
        return make

    return enter


def load() -> list[Mistake]:
    """All mistakes."""
    if not ALL:
        import mistakes_fairseq
        import mistakes_parts
        import mistakes_trainer

        del mistakes_fairseq, mistakes_parts, mistakes_trainer  # entered in ALL
    return ALL


def raised(mistake: Mistake) -> BaseException | None:
    """What the mistake raises, made in a folder of its own."""
    before = os.getcwd()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                mistake.make()
        except Exception as error:
            return error
        finally:
            os.chdir(before)
            logging.disable(logging.NOTSET)
    return None


def message(error: BaseException) -> str:
    """The text with its notes, as a traceback ends."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    text = re.sub(r"ctrainer-test-\w+", "FOLDER", text)
    text = re.sub(r"/\S*/FOLDER|/tmp/tmp\w+", "FOLDER", text)
    text = re.sub(r"/[^\s()]*/(\w+\.py):\d+", r"\1:N", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "ADDRESS", text)
    return re.sub(r'File "/\S*/([\w/.-]+)", line \d+', r'File "\1", line N', text)


def follows(mistake: Mistake, error: BaseException) -> dict[str, bool]:
    """Which rules the error follows."""
    text = message(error)
    said = re.sub(r"^(    |  File).*$", "", text, flags=re.M)  # without lines of code
    user = mistake.user
    frames = traceback.extract_tb(error.__traceback__)
    in_trace = any(f.filename == mistake.file and f.name == user for f in frames)
    # A function that has returned is in no traceback: its file and line are as good.
    in_text = re.search(rf"\b{user} \({Path(mistake.file).name}:N\)", text)
    in_worker = re.search(rf'{Path(mistake.file).name}", line N, in {user}\b', text)
    return {
        "names": mistake.names in text,
        "shows": mistake.shows in text,
        "says": bool(ADVICE.search(said)),
        "frame": user is None or in_trace or bool(in_text or in_worker),
    }


def golden() -> dict[str, str]:
    """The messages that are expected, by the mistakes' names."""
    parts = re.split(r"^== (\w+)\n", GOLDEN.read_text(), flags=re.M)[1:]
    return {k: v.rstrip("\n") for k, v in zip(parts[::2], parts[1::2], strict=True)}


def main() -> None:
    score = dict.fromkeys(RULES, 0)
    texts = []
    for one in load():
        error = raised(one)
        if error is None:
            print(f"{one.name}: raises nothing")
            continue
        kept = follows(one, error)
        for rule, holds in kept.items():
            score[rule] += holds
        texts.append(f"== {one.name}\n{message(error)}\n")
        broken = [rule for rule, holds in kept.items() if not holds]
        if broken:
            print(f"{one.name}: {', '.join(broken)}\n    {message(error)}")
    GOLDEN.write_text("".join(texts))
    print(f"of {len(load())}: {score}")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "support")]
    import mistakes  # the module in which the others enter theirs

    mistakes.main()
