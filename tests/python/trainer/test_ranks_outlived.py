"""A run continues with the ranks that are left, as if started with so many."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import networks
import pytest
import ranks

from ctrainer import TrainingArguments

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
    folder: Path,
    killed: list[int],
    at: int,
    place: str,
    arguments: dict[str, Any],
    **options: Any,
) -> None:
    """A run whose ranks are killed, and one that was started with the others from a
    checkpoint of the same step, which an undisturbed run has saved."""
    world = 4
    done = run(
        folder / "run", world, killed=killed, at=at, where=place,
        arguments={**arguments, "min_world_size": 1}, **options,
    )  # fmt: skip
    left = [found for rank, found in enumerate(done) if rank not in killed]
    for rank in killed:
        assert done[rank].code == (1 if options else -9)
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
    without = ", ".join(map(str, killed))
    assert f"Continuing without rank {without}, with {len(left)} of 4" in left[0].output
    assert f"was saved by 4 rank(s) and {len(left)} resume from it" in left[0].output


def test_it_resumes_from_the_last_whole_update(tmp_path: Path) -> None:
    compare(tmp_path, [0, 1], 4, "forward", {})


def test_local_steps_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="min_world_size does not go with local steps"):
        TrainingArguments(tmp_path, use_bmuf=True, min_world_size=1)


@pytest.mark.exhaustive
def test_a_rank_that_raises_an_error_of_its_own_is_lost(tmp_path: Path) -> None:
    compare(tmp_path, [1], 4, "forward", {}, raises=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("killed", "at", "place", "arguments"),
    [
        ([2, 3], 4, "forward", {}),
        ([3], 4, "update", PARTS),
        ([2], 4, "log", {}),
        ([3], 4, "backward", PARTS),
        ([1, 2, 3], 4, "forward", {}),
        ([2, 3], 4, "forward", SHARDED),
        ([0], 4, "forward", SHARDED),
    ],
)
def test_wherever_ranks_are_killed(
    killed: list[int], at: int, place: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    compare(tmp_path, killed, at, place, arguments)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("arguments", [{}, SHARDED])
def test_a_machine_is_lost(
    first: bool, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """Also the one with the store of torch.distributed's group."""
    networks.need()
    killed = [0, 1] if first else [2, 3]
    options = {
        "of": 4, "killed": killed, "at": 4,
        "arguments": {**arguments, "save_steps": 3, "min_world_size": 2},
    }  # fmt: skip
    program = "programs.trainer.outlived_apart"
    networks.run(tmp_path, 1000, ["-m", program, str(tmp_path), json.dumps(options)])
    left = [rank for rank in range(4) if rank not in killed]
    for number, rank in enumerate(left):
        told = json.loads((tmp_path / f"told{rank}.json").read_text())
        assert told["place"] == told["torch"] == [number, 2]
        assert max(map(int, told["losses"])) == 8
        print(f"{told['seconds']:.2f} seconds to the first update of rank {number}")
        assert told["seconds"] < 30


@pytest.mark.exhaustive
def test_torchrun_on_each_machine_lets_the_others_continue(tmp_path: Path) -> None:
    """The first machine's has the store by which all have found each other."""
    options = {
        "of": 2, "killed": [0], "at": 4, "agents": True,
        "arguments": {"save_steps": 3, "min_world_size": 1},
    }  # fmt: skip
    shared = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    shared += ["--master-addr=127.0.0.1", f"--master-port={ranks.free_port()}"]
    program = ["-m", "programs.trainer.outlived", str(tmp_path), json.dumps(options)]
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(
                ranks.started([*shared, f"--node-rank={node}", *program], [{}])
            )[0]
            for node in range(2)
        ]
        assert [agent.wait(ranks.LIMIT_SECONDS) for agent in agents] == [-9, 0]
    told = json.loads((tmp_path / "told1.json").read_text())
    assert told["place"] == told["torch"] == [0, 1]
    assert max(map(int, told["losses"])) == 8
    print(f"{told['seconds']:.2f} seconds to the first update")
    assert told["seconds"] < 30
