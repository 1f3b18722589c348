"""Fine-tunings on the shards of two ranks against transformers' Trainer in one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import fine_tunings
import ranks
import torch
from draws import draws

TABLE = fine_tunings.table()
EACH = 10  # in one run of the ranks


@pytest.mark.parametrize("first", range(0, draws(EACH, fine_tunings.COUNT), EACH))
def test_two_sharded_ranks_train_what_transformers_trains_in_one(
    first: int, tmp_path: Path
) -> None:
    for case in TABLE[first : first + EACH]:
        before = {
            n: v.clone() for n, v in fine_tunings.build(case).state_dict().items()
        }
        expected = fine_tunings.train(case, f"{tmp_path}/{case.number}", sharded=False)
        torch.save((expected, before), tmp_path / f"{case.number}.pt")
    options = {"first": first, "end": first + EACH}
    told: list[Any] = ranks.told(ranks.run(tmp_path, "parity.fine_tuning", **options))
    for failed in told:
        assert not failed, f"{len(failed)} of {EACH}:\n" + "\n".join(failed.values())


def test_the_table_has_ten_fine_tunings_of_every_value() -> None:
    for axis, values in fine_tunings.AXES.items():
        counted = Counter(case[axis] for case in TABLE)
        assert set(counted) == set(values)
        assert min(counted.values()) >= 10
