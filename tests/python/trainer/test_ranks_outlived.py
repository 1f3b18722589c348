"""A run continues with the ranks that are left, as one that was started with so many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks

pytest.importorskip("torch")

SHARDED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 20}}
PARTS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


def run(folder: Path, world: int, **options: Any) -> list[ranks.Rank]:
    given = {"save_steps": 3, **options.pop("arguments", {})}
    return ranks.run(
        folder, "trainer.outlived", world, **options, of=world, arguments=given
    )


def losses(told: Any, place: str) -> dict[str, float]:
    """By step. A log that was due when the ranks were killed is joined with the next,
    without what the dead had added up."""
    lost = ("5", "6") if place == "update" else ()
    return {step: loss for step, loss in told["losses"].items() if step not in lost}


def compare(
    folder: Path, killed: list[int], at: int, place: str, arguments: dict[str, Any]
) -> None:
    """A run whose ranks are killed, and one that was started with the others from a
    checkpoint of the same step, which an undisturbed run has saved."""
    world = 4
    done = run(
        folder / "run", world, killed=killed, at=at, where=place,
        arguments={**arguments, "min_world_size": 1},
    )  # fmt: skip
    left = [found for rank, found in enumerate(done) if rank not in killed]
    for rank in killed:
        assert done[rank].code == -9
    told = ranks.told(left)
    resumed = told[0]["resumed"]
    step = int(resumed.rsplit("-", 1)[1])
    assert step == (3 if "fsdp" in arguments else at + (place == "update"))
    ranks.told(run(folder / "whole", world, at=step, stops=True, arguments=arguments))
    begins = str(folder / "whole" / f"checkpoint-{step}")
    wanted = ranks.told(
        run(folder / "fewer", len(left), at=0, resume=begins, arguments=arguments)
    )[0]
    assert len(wanted["losses"]) == 8
    for number, found in enumerate(told):
        assert losses(found, place) == losses(wanted, place)
        assert found["weights"] == wanted["weights"]
        assert found["place"] == found["torch"] == [number, len(left)]
        print(f"{found['seconds']:.2f} seconds to the first update of rank {number}")
        assert found["seconds"] < 30
    assert "Continuing with" in left[0].output


def test_it_resumes_from_the_last_whole_update(tmp_path: Path) -> None:
    compare(tmp_path, [0, 1], 4, "forward", {})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("killed", "at", "place", "arguments"),
    [
        ([2, 3], 4, "forward", {}),
        ([3], 4, "update", PARTS),
        ([2], 4, "log", {}),
        ([1, 2, 3], 4, "forward", {}),
        ([2, 3], 4, "forward", SHARDED),
        ([0], 4, "forward", SHARDED),
    ],
)
def test_wherever_ranks_are_killed(
    killed: list[int], at: int, place: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    compare(tmp_path, killed, at, place, arguments)
