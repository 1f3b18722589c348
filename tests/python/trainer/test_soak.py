"""A long run on 2 ranks with saves and evaluations leaves nothing behind."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import ranks
from draws import draws

PARTS = 10  # of a run, each with equally many saves and a sample at its end
# The heap may grow by a few pages that other blocks hold in place; what an update
# leaves behind, 100 bytes of it, would be 8 MB in 80,000 updates.
GROWTH_BYTES = 2 << 20


def test_memory_descriptors_and_the_time_of_an_update_stay_level(
    tmp_path: Path,
) -> None:
    updates = draws(400, 100_000)
    every = max(updates // 200, 40)
    done = ranks.run(
        tmp_path, "trainer.soak", updates=updates, parts=PARTS, every=every
    )
    for samples in ranks.told(done):
        assert len(samples) == PARTS
        warm, last = samples[PARTS // 5 :], samples[-1]
        assert last["resident"] - warm[0]["resident"] < GROWTH_BYTES
        assert {each["descriptors"] for each in warm} == {last["descriptors"]}
        assert {each["threads"] for each in warm} == {last["threads"]}
        ends = [each["seconds"] for each in samples]
        parts = [b - a for a, b in pairwise(ends)]
        # What else the machine does is in some parts, what grows in each of the last.
        assert min(parts[-3:]) < 1.5 * sorted(parts)[len(parts) // 2]
