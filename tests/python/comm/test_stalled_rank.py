"""The ranks that wait for one that stalls say so long before the time-out."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks


@pytest.mark.parametrize("over", ["shm", "gloo"])
def test_a_rank_that_stalls_is_named_and_may_still_come(
    over: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if over == "gloo":
        pytest.importorskip("torch")
    monkeypatch.setenv("CTRAINER_STALL_SECONDS", "0.5")
    done = ranks.run(tmp_path, "comm.stalled", 3, over=over, seconds=5.0)
    told = ranks.told(done)
    assert [values for values, _ in told] == [[9.0] * 4] * 3
    who = f"rank 1 (process {told[1][1]})" if over == "shm" else "rank 1\n"
    for rank in (0, 2):
        assert f"on rank {rank}" in done[rank].output
        assert f"seconds for {who}" in done[rank].output
    assert "has waited" not in done[1].output


def test_seconds_that_make_no_sense_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTRAINER_STALL_SECONDS", "soon")
    (done,) = ranks.run(tmp_path, "comm.stalled", 1, over="shm", seconds=0.0)
    assert done.code != 0
    assert "CTRAINER_STALL_SECONDS is 'soon'; expected seconds above 0" in done.output
