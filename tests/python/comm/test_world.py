"""The group of the run: joined once a process, left, joined again, not by children."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

from ctrainer import comm
from ctrainer.comm import run


def test_ranks_share_one_group_and_join_again_after_leaving(tmp_path) -> None:
    found = ranks.told(ranks.run(tmp_path, "comm.world", apart=True))
    assert found == ["done 0", "done 1"]


def test_without_a_launcher_it_is_a_group_of_one() -> None:
    group = comm.world()
    assert (group.rank, group.world_size, group.backend) == (0, 1, "self")
    assert comm.world() is group
    assert (run.place().rank, run.place().world_size) == (0, 1)
    group.close()
    assert comm.world() is not group


def test_a_group_of_one_is_not_kept_when_the_process_becomes_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = comm.world()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises((RuntimeError, ValueError), match="MASTER_ADDR"):
        comm.world()
    monkeypatch.undo()
    assert comm.world() is alone


def test_a_group_of_torch_may_end_and_another_begin(tmp_path: Path) -> None:
    run.leave()
    for number in range(2):
        url = f"file://{tmp_path}/{number}"
        dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        values = torch.tensor([3.0])
        comm.world().broadcast(values)
        assert values.tolist() == [3.0]
        dist.destroy_process_group()
