"""How many examples generated tests draw: some in `make test`, all in `make test-all`.

Examples are drawn from fixed seeds, so that the small draw begins the full one. A test
that has no small draw is marked `exhaustive` and runs in `make test-all` only.
"""

from __future__ import annotations

import os

EXHAUSTIVE = os.environ.get("CTRAINER_EXHAUSTIVE", "0") == "1"


def draws(small: int, full: int) -> int:
    """The number of examples: `small`, or `full` under CTRAINER_EXHAUSTIVE=1."""
    assert 0 < small <= full, f"draws({small}, {full}): give the smaller count first"
    return full if EXHAUSTIVE else small
