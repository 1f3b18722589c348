"""A run continues with the ranks that are left, as if started with so many."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import networks
import pytest
import ranks

from ctrainer import TrainingArguments

pytest.importorskip("torch")

SHARDED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 20}}
HYBRID = {**SHARDED, "fsdp": "hybrid_shard auto_wrap"}  # a machine has a replica


def replicas(shards: int) -> dict[str, Any]:
    """Each of so many ranks has a part of the model that other ranks have, too."""
    stage = {"stage": 3, "mics_shard_size": shards,
             "stage3_param_persistence_threshold": 20}  # fmt: skip
    return {"deepspeed": {"zero_optimization": stage}, "ema_decay": 0.5}


PARTS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


def run(folder: Path, world: int, **options: Any) -> list[ranks.Rank]:
    given = {"save_steps": 3, **options.pop("arguments", {})}
    return ranks.run(
        folder, "trainer.outlived", world, **options, of=world, arguments=given
    )


def losses(told: Any, place: str) -> dict[str, float]:
    """By step. A log that was due when the ranks were killed is joined with the next,
    without what the dead had added up."""
    lost = {"update": ("5", "6"), "signal": ("7", "8")}.get(place, ())
    return {step: loss for step, loss in told["losses"].items() if step not in lost}


def compare(
    folder: Path,
    killed: list[int],
    at: int,
    place: str,
    arguments: dict[str, Any],
    step: int | None = None,
    after: dict[str, Any] | None = None,
    raises: bool = False,
    then: tuple[str, int] | None = None,
) -> None:
    """A run whose ranks are killed, and one that was started with the others from a
    checkpoint of the same step, which an undisturbed run has saved.

    step: from which the others resume; None: the one at which ranks are killed. after:
    the arguments for those that are left, where they differ. then: a rank that is
    killed while the others are "joining" or "resuming", or "late" to resume.
    """
    if step is None:
        step = at + (place == "update")
    world = 4
    done = run(
        folder / "run", world, killed=killed, at=at, where=place, raises=raises,
        arguments={**arguments, "min_world_size": 1}, **dict([then] if then else []),
    )  # fmt: skip
    if then and then[0] != "late":
        killed = sorted({*killed, then[1]})
    left = [found for rank, found in enumerate(done) if rank not in killed]
    for rank in killed:
        assert done[rank].code == (1 if raises else -15 if place == "signal" else -9)
    told = ranks.told(left)
    assert told[0]["resumed"].endswith(f"checkpoint-{step}")
    ranks.told(run(folder / "whole", world, at=step, stops=True, arguments=arguments))
    begins = str(folder / "whole" / f"checkpoint-{step}")
    after = after or arguments
    wanted = ranks.told(
        run(folder / "fewer", len(left), at=0, resume=begins, arguments=after)
    )[0]
    assert len(wanted["losses"]) == 8
    for number, found in enumerate(told):
        assert losses(found, place) == losses(wanted, place)
        assert found["weights"] == wanted["weights"]
        assert found["evaluated"] == wanted["evaluated"]
        assert found["place"] == found["torch"] == [number, len(left)]
        print(f"{found['seconds']:.2f} seconds to the first update of rank {number}")
        assert found["seconds"] < 30
    output = left[0].output
    if then is None:
        without = ", ".join(map(str, killed))
        assert f"Continuing without rank {without}, with {len(left)} of 4" in output
    assert f"was saved by 4 rank(s) and {len(left)} resume from it" in output


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
    ("killed", "place", "arguments", "step"),
    [
        ([2, 3], "forward", {}, None),
        ([3], "update", PARTS, None),
        ([2], "log", {}, None),
        ([3], "backward", PARTS, None),
        ([3], "middle", {}, None),
        ([3], "middle", SHARDED, 3),
        ([1, 2, 3], "forward", {}, None),
        ([3], "updated", {}, 3),
        ([3], "signal", {}, 7),
        ([2, 3], "forward", SHARDED, 3),
        ([0], "forward", SHARDED, 3),
    ],
)
def test_wherever_ranks_are_killed(
    killed: list[int],
    place: str,
    arguments: dict[str, Any],
    step: int | None,
    tmp_path: Path,
) -> None:
    compare(tmp_path, killed, 4, place, arguments, step)


def test_a_replica_continues_from_the_last_whole_update(tmp_path: Path) -> None:
    compare(tmp_path, [2, 3], 4, "forward", replicas(2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("killed", "place", "step"),
    [
        ([0, 1], "backward", 4),
        ([0, 3], "forward", 4),  # the others have both parts
        ([3], "agreed", 4),
        ([2], "middle", 4),
        ([3], "update", 5),
        ([2], "log", 4),
        ([1, 3], "forward", 3),  # a part is lost
        ([2, 3], "updated", 3),
        ([3], "signal", 7),
    ],
)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_grad_norm": 0, "optim": "adafactor"},
        {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
    ],
)
def test_replicas_wherever_ranks_are_killed(
    killed: list[int],
    place: str,
    step: int,
    arguments: dict[str, Any],
    tmp_path: Path,
) -> None:
    options = replicas(2) | arguments
    after = replicas(4 - len(killed)) | arguments
    compare(tmp_path, killed, 4, place, options, step, after)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", [{}, replicas(2)])
@pytest.mark.parametrize(
    "then", [("joining", 0), ("joining", 2), ("resuming", 0), ("late", 2)]
)
def test_another_is_killed_meanwhile(
    arguments: dict[str, Any], then: tuple[str, int], tmp_path: Path
) -> None:
    """Of the others both parts are left, where there are parts."""
    killed = 1 if then == ("joining", 2) else 3
    after = replicas(3) if arguments and then[0] == "late" else arguments
    compare(tmp_path, [killed], 4, "forward", arguments, None, after, then=then)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("arguments", [{}, SHARDED, HYBRID])
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
        step = 3 if arguments is SHARDED else 4
        assert told["resumed"].endswith(f"checkpoint-{step}")
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", [{}, replicas(2)])
def test_ranks_that_torchrun_ends_leave_the_others(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    """One rank of the second machine dies, and torchrun ends the other one there."""
    options = {
        "of": 4, "killed": [3], "at": 4,
        "arguments": {"save_steps": 3, "min_world_size": 1, **arguments},
    }  # fmt: skip
    shared = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    shared += ["--master-addr=127.0.0.1", f"--master-port={ranks.free_port()}"]
    program = ["-m", "programs.trainer.outlived", str(tmp_path), json.dumps(options)]
    end = time.monotonic() + 120
    with contextlib.ExitStack() as stack:
        for node in range(2):
            node_rank = f"--node-rank={node}"
            stack.enter_context(ranks.started([*shared, node_rank, *program], [{}]))
        while len(list(tmp_path.glob("told?.json"))) < 2:  # torchrun stays longer
            assert time.monotonic() < end
            time.sleep(0.1)
    for rank in range(2):
        told = json.loads((tmp_path / f"told{rank}.json").read_text())
        assert told["place"] == told["torch"] == [rank, 2]
        assert max(map(int, told["losses"])) == 8
    assert not (tmp_path / "told2.json").exists()
