"""Sharded models on two machines that a link joins: the bytes that the link counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networks

WIDTH = 512
BYTES = 4 * WIDTH * WIDTH * 4  # of all parameters, in float32
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "secondary": {"secondary_shards": 2},
    "quantized": {"secondary_shards": 2, "gather_bits": 8, "reduce_bits": 4},
}
# In bytes of all parameters, from each of two machines: half of them for each gather,
# and as many gradients. A quantized value has 8 or 4 bits, and 256 of them a float32.
EXPECTED = {
    "plain": 3 / 2,
    "secondary": 2 / 2,
    "quantized": ((8 + 32 / 256) / 32 + (4 + 32 / 256) / 32) / 2,
}


def test_an_update_crosses_the_link_with_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    networks.need()
    found = networks.told(
        tmp_path, "fsdp.crossing", 1000, width=WIDTH, updates=1, cases=CASES
    )
    for told in (found[0], found[2]):  # of both machines
        sent = {name: count for name, (count, _) in told.items()}
        for name, parts in EXPECTED.items():
            # Headers of packets, and of gloo's messages.
            assert BYTES * parts < sent[name] < 1.1 * BYTES * parts + 20_000
        assert sent["quantized"] < sent["plain"] / 4
    for told in found:
        losses = {name: each for name, (_, each) in told.items()}
        assert losses["secondary"] == losses["plain"]
        for exact, rounded in zip(losses["plain"], losses["quantized"], strict=True):
            assert abs(rounded - exact) < 0.02 * losses["plain"][0]
