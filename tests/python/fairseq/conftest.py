"""What tests of fairseq's modules share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_aliases_are_left() -> Iterator[None]:
    """A --user-dir lets fairseq's names mean ours, in the whole process."""
    yield
    aliases = sys.modules.get("ctrainer.fairseq.aliases")
    if aliases is not None:
        aliases.remove_fairseq_aliases()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """perf_counter under the test's control."""
    stopped = Clock()
    monkeypatch.setattr("time.perf_counter", stopped)
    return stopped
