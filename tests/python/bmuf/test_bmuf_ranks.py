"""BMUF on 3 and 4 processes, which know NumPy alone, against its formulas; and what one
rank's trouble does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 4 ranks found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.told(ranks.run(folder, "bmuf.arrays", world=4))


Told = list[dict[str, Any]]


def test_codes_of_distances_are_the_formulas(told: Told) -> None:
    """Bit for bit: codes, what they miss, and the sums of parts in float32."""
    for rank, found in enumerate(r["coded"] for r in told):
        assert len(found) == (12 if rank < 3 else 6)
        assert [name for name, same in found.items() if not same] == []


def test_an_average_that_is_taken_later_is_the_formulas(told: Told) -> None:
    """Bit for bit: the new global model, and what was learnt since the ranks met."""
    for rank, found in enumerate(r["overlapped"] for r in told):
        assert len(found) == (12 if rank < 3 else 6)
        assert [name for name, same in found.items() if not same] == []


def test_an_average_on_its_way_is_saved_and_can_be_finished(told: Told) -> None:
    away, rejected, same, away_again = True, True, True, True
    left, stays, as_new = True, False, True
    expected = [away, rejected, same, away_again, False, True, False]
    expected += [left, stays, as_new]
    assert [r["overlapped resume"] for r in told] == [expected] * 4


def test_what_codes_miss_is_saved(told: Told) -> None:
    assert [r["coded resume"] for r in told] == [[[True] * 3] * 2] * 4


def test_every_combination_on_3_and_4_ranks_is_the_formulas(told: Told) -> None:
    """Bit for bit: shares are added in double and rounded once."""
    for rank, found in enumerate(r["oracle"] for r in told):
        combinations = 2**5 + 2 * 2**4
        assert len(found) == combinations * (2 if rank < 3 else 1) + 1
        assert [name for name, same in found.items() if not same] == []


def test_a_nan_of_one_rank_is_in_all_after_the_block(told: Told) -> None:
    for rank in told:
        assert rank["nan"] == [0, 0, 1, 0, True]


def test_a_slow_rank_is_waited_for(told: Told) -> None:
    assert [rank["slow"] for rank in told] == [True] * 4


def test_an_update_that_is_skipped_counts_in_its_block(told: Told) -> None:
    assert [rank["skip"] for rank in told] == [[4, 1]] * 4


def test_other_parameters_at_the_start_are_told_on_every_rank(told: Told) -> None:
    for rank in told:
        assert rank["unlike"].startswith("the block of rank 1 began with other param")
        assert "have warmup_iterations" in rank["unlike"]
        assert rank["averaged"] == 1


def test_ranks_join_and_leave_at_the_ends_of_blocks(told: Told) -> None:
    for rank, found in enumerate(r["elastic"] for r in told):
        assert found["kept"]
        assert (found["updates"], found["joined"], found["trained"]) == (4, 1, 1)
        assert found["momentum"] == [1, True]
        assert found["stay"] == [1, 2, 3]
        assert found.get("left") == ([3, 8, 1] if rank else None)


def test_slowmo_without_a_rate_is_rejected(told: Told) -> None:
    for rank in told:
        assert rank["rate"].startswith("the optimizer's lr is 0.0 where a block of Sl")


def test_a_rank_that_dies_is_named_on_all_others(told: Told) -> None:
    for rank in told[:3]:
        assert "rank 3 (process " in rank["death"]
        assert "died" in rank["death"]
