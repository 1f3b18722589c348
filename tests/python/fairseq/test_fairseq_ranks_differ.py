"""fairseq's Trainer tells all ranks of one that makes a step or a sample less."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import ranks
from draws import draws

SHARED = ["pytorch_ddp", "legacy_ddp"]


def cases(draw: random.Random, world: int, engine: bool) -> list[list[object]]:
    """Backends with what one rank does, which rank and in which of 4 updates."""
    kinds = [(b, k) for b in SHARED for k in ("ends", "skips", "samples")]
    kinds += [("bmuf", "ends"), ("bmuf", "skips")]
    if engine:  # gloo itself ends a process that gets other bytes than it asked for
        kinds = [(b, k) for b, k in kinds if b != "pytorch_ddp" or k == "samples"]
    kinds += [(b, "dummies") for b in SHARED]  # which the original makes for itself
    draw.shuffle(kinds)
    return [[b, k, draw.randrange(world), draw.randrange(4)] for b, k in kinds]


def check(told: list[list[object]], case: list[object]) -> None:
    _, kind, wrong, _ = case
    if kind == "dummies":
        assert told == [None] * len(told)
        return
    for each in told:
        assert each is not None, case
        text, seconds = each
        assert isinstance(text, str)
        assert isinstance(seconds, float)
        assert seconds < 30, case  # the groups would wait half an hour
        assert text.startswith("ValueError: ranks are in different steps"), text
        assert re.search(rf"rank {wrong} (is in|averages) ", text), text
        if len(told) > 2:
            assert f"{len(told) - 1} of {len(told)} ranks are with rank" in text, text
            assert f"are with rank {wrong}" not in text, text


@pytest.mark.parametrize("engine", [False, True], ids=["shm", "engine"])
@pytest.mark.parametrize("seed", range(draws(1, 8)))
def test_a_rank_with_a_step_or_a_sample_less_is_named_by_all(
    tmp_path: Path, seed: int, engine: bool
) -> None:
    draw = random.Random(f"{seed} {engine}")
    world = 2 + seed % 2
    drawn = cases(draw, world, engine)
    last = "" if engine else draw.choice([*SHARED, "fully_sharded"])
    options = {"cases": drawn, "last": last, "engine": engine}
    made = ranks.run(tmp_path, "fairseq.ranks_differ", world, **options)
    for rank in made:
        assert rank.told is not None, rank.output
    for number, case in enumerate(drawn):
        check([rank.told[number] for rank in made], case)
    if last:
        for rank in made[:-1]:
            text, seconds = rank.told[-1]
            assert re.search(rf"rank {world - 1} \(process \d+\) ", text), text
            assert seconds < 30
