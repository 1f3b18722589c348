"""The sums of losses that a run resumes with where other ranks have saved it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctrainer.trainer import checkpoint


def save(folder: Path, name: str, **loss: Any) -> None:
    content = {
        "version": 1,
        "world_size": 2,
        "loss": loss,
        "resume": checkpoint.to_json({}),
    }
    (folder / name).write_text(json.dumps(content))


def test_sums_of_two_ranks_are_resumed_with_the_mean_loss_of_both(
    tmp_path: Path,
) -> None:
    """Six updates, of which four are logged; the second rank's loss was once no number:
    means of 18 / 8 and of 8 / 3."""
    of_both: dict[str, Any] = {"window_start": 4, "total_bad": 0, "nonfinite_total": 1}
    save(tmp_path, "ctrainer_state.json", window_loss=3.0, window_bad=0,
         total_loss=8.0, **of_both)  # fmt: skip
    save(tmp_path, "ctrainer_state_1.json", window_loss=5.0, window_bad=1,
         total_loss=10.0, **of_both)  # fmt: skip
    found = checkpoint._of_each_rank(str(tmp_path), 2, 6)
    assert (found["window_start"], found["nonfinite_total"]) == (4, 1)
    assert found["total_loss"] / (4 - found["total_bad"]) == pytest.approx(18 / 8)
    assert found["window_loss"] / (2 - found["window_bad"]) == pytest.approx(8 / 3)


def test_sums_of_the_first_rank_count_where_no_other_is_at_hand(tmp_path: Path) -> None:
    own = {"window_loss": 3.0, "window_bad": 0, "total_loss": 8.0, "total_bad": 0,
           "window_start": 4}  # fmt: skip
    save(tmp_path, "ctrainer_state.json", **own)
    assert checkpoint._of_each_rank(str(tmp_path), 2, 6) == own
