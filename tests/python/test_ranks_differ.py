"""Ranks that do not do the same are told who does what; equal ones are left alone."""

from __future__ import annotations

import random
from pathlib import Path

import desync_scenarios
import pytest
import ranks
from draws import draws
from rank_threads import on_ranks


@pytest.mark.parametrize("kind", desync_scenarios.KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(draws(2, 40)))
def test_ranks_in_different_units_are_told_which(kind, seed: int) -> None:
    draw = random.Random(f"{kind.__name__} {seed}")
    world = draw.choice([2, 3, 4])
    wrong = draw.randrange(world)
    told = on_ranks(world, lambda group: desync_scenarios.run(group, kind, wrong, seed))
    desync_scenarios.check(told, kind, wrong)


@pytest.mark.parametrize("seed", range(draws(4, 100)))
def test_equal_ranks_are_told_nothing(seed: int) -> None:
    world = random.Random(seed).choice([2, 3, 4])

    def train(group):
        return desync_scenarios.run(group, desync_scenarios.same, -1, seed)

    assert on_ranks(world, train) == [None] * world


OVER_PROCESSES = """
import desync_scenarios as scenarios
found = []
for number, kind in enumerate([*scenarios.KINDS, scenarios.same]):
    wrong = number % world
    if scenarios.KINDS.get(kind) != "left":  # nothing would work behind that
        found.append([wrong, scenarios.run(group, kind, wrong, number)])
tell(found)
"""


def test_ranks_over_torchs_groups_are_told_where_collectives_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTRAINER_CHECK_COLLECTIVES", "1")
    join = (
        "from ctrainer.comm.process_group import communicator\ngroup = communicator()\n"
    )
    body = ranks.GLOO + join + OVER_PROCESSES
    every = ranks.told(ranks.run_ranks(tmp_path, body, 3))
    kinds = [k for k, why in desync_scenarios.KINDS.items() if why != "left"]
    assert len(every[0]) == len(kinds) + 1
    for number, kind in enumerate(kinds):
        told = [rank[number][1] for rank in every]
        desync_scenarios.check(told, kind, every[0][number][0])
    assert [rank[-1][1] for rank in every] == [None] * 3


LENGTHS = """
import ctrainer, tiny
from rank_lengths import OwnLoader, Skipping, Stream, run
uneven = {"even_batches": False, "dispatch_batches": False}
longer = 8 * (rank == world - 1)
all_read = {"accelerator_config": {"dispatch_batches": False}, "max_steps": 20}
tell({
    "rows": run(folder, ctrainer.Trainer, tiny.rows(41 + (rank == 1))),
    "batches": run(folder, ctrainer.Trainer, tiny.rows(40 + 4 * world * rank)),
    "own": run(folder, OwnLoader, tiny.rows(40 + longer)),
    "stream": run(folder, ctrainer.Trainer, Stream(40 + 4 * world * rank), **all_read),
    "skip": run(folder, Skipping, tiny.rows(64 * world), skips=rank == 1),
    "asked for": run(folder, OwnLoader, tiny.rows(40 + longer),
                     accelerator_config=uneven),
    "equal": run(folder, ctrainer.Trainer, tiny.rows(41)),
    "equal streams": run(folder, ctrainer.Trainer, Stream(41), max_steps=3),
})
"""


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_unequal_data_is_told_with_the_length_on_each_rank(
    tmp_path: Path, world: int
) -> None:
    first, *others = ranks.told(ranks.run_ranks(tmp_path, LENGTHS, world))
    assert others == [first] * (world - 1)
    differ = "ValueError: the ranks' training data differ in length: rank 0 has"
    assert first["rows"].startswith(differ)
    assert "rank 0 has 41 rows in" in first["rows"]
    assert "rank 1 has 42 rows in" in first["rows"]
    assert first["batches"].startswith(f"{differ} 40 rows in")
    assert f"rank 1 has {40 + 4 * world} rows in" in first["batches"]
    assert f"rank {world - 1} has 48 rows in 12 batches" in first["own"]
    assert "rank 0 has 40 rows in 10 batches" in first["own"]
    assert "the ranks have different numbers of batches for update" in first["stream"]
    assert "set accelerator_config={'even_batches': False}" in first["stream"]
    assert first["skip"].startswith(
        "ValueError: the ranks have different numbers of batches for update 3: rank 0 "
        "has 2, rank 1 has 1"
    )
    assert first["asked for"] == 5
    assert isinstance(first["equal"], int)
    assert first["equal streams"] == 3
