"""Typical mistakes: their messages, word for word, and the rules that these follow.

`python -m tests.python.runtime.mistakes` writes the messages anew, of torch 2.13 and
transformers 5.17, and prints the score.
"""

from __future__ import annotations

import mistakes
import pytest

TABLE = {one.name: one for one in mistakes.load()}
# Errors that the user's own code raises, of which nobody else knows the remedy.
BROKEN = {
    "a_callback_that_raises": "says",
    "a_callback_that_reads_what_is_not_logged": "says",
    "metrics_that_fail_in_a_training": "says",
}


def test_there_are_eighty_mistakes_of_every_part() -> None:
    assert len(TABLE) == len(mistakes.ALL) >= 80
    assert list(mistakes.golden()) == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_explained(name: str) -> None:
    error = mistakes.raised(TABLE[name])
    assert error is not None, "nothing is raised"
    assert mistakes.message(error) == mistakes.golden()[name]
    held = mistakes.follows(TABLE[name], error)
    broken = [rule for rule in mistakes.RULES if not held[rule]]
    assert " ".join(broken) == BROKEN.get(name, "")
