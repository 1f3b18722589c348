"""The page on errors names messages that the code has."""

import re

import pytest
from places import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## By message")[2], re.M)
SOURCES = [
    *(ROOT / "ctrainer").rglob("*.py"),
    *(ROOT / "csrc").rglob("*.c"),
]


@pytest.fixture(scope="module")
def product() -> str:
    """All sources, with the pieces of a string over several lines joined."""
    text = "\n".join(path.read_text() for path in SOURCES)
    return re.sub(r"\"\s*\n\s*f?\"", "", text)


def test_there_are_messages() -> None:
    assert len(MESSAGES) >= 15


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_code(message: str, product: str) -> None:
    assert message in product
