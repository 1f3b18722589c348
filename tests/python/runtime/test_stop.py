"""The end of a run that a signal has stopped."""

from __future__ import annotations

import signal
import sys

import pytest

from ctrainer.runtime.stop import end_by


def test_other_exceptions_reach_the_hook_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, at: seen.append(error))
    stops = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match=r"^why$") as caught:
            end_by(signal.SIGINT, None, "why")
        stops.append(caught.value)
    others = [ValueError(), KeyboardInterrupt()]
    for error in (*stops, *others):
        sys.excepthook(type(error), error, None)
    assert seen == others
