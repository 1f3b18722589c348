"""Where the processes of a run meet, and starting them."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
from ranks import run_alone

from ctrainer.fairseq import distributed


def group(**changes: Any) -> SimpleNamespace:
    values = {
        "distributed_init_method": None, "distributed_world_size": 1,
        "distributed_rank": 0, "distributed_port": -1, "distributed_no_spawn": False,
        "distributed_num_procs": 1, "distributed_backend": "nccl", "device_id": 0,
        "heartbeat_timeout": -1,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name in {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}:
            monkeypatch.delenv(name)
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("wanted", ["nccl", "gloo", "mpi"])
def test_nccl_is_for_tensors_that_gpus_have(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cpu: bool, wanted: str
) -> None:
    processes = pytest.importorskip("ctrainer.comm.processes")
    joined: list[Any] = []
    monkeypatch.setattr(logging.getLogger(), "setLevel", lambda level: None)
    monkeypatch.setattr(processes, "gpus", lambda: gpus)
    monkeypatch.setattr(processes, "join", lambda *place: joined.append(place) or 1)
    found = group(
        distributed_backend=wanted, distributed_init_method="tcp://host:1",
        distributed_rank=1, distributed_world_size=2, heartbeat_timeout=7,
    )  # fmt: skip
    cfg = SimpleNamespace(distributed_training=found, common=SimpleNamespace(cpu=cpu))
    assert distributed.distributed_init(cfg) == 1
    backend = "gloo" if wanted == "nccl" and (cpu or gpus == 0) else wanted
    assert joined == [(backend, "tcp://host:1", 1, 2, 7)]


def test_one_worker_meets_nobody(no_launcher: pytest.MonkeyPatch) -> None:
    cfg = group()
    distributed.infer_init_method(cfg)
    assert cfg.distributed_init_method is None


def test_several_workers_meet_at_a_free_port(no_launcher: pytest.MonkeyPatch) -> None:
    cfg = group(distributed_world_size=3)
    distributed.infer_init_method(cfg)
    assert cfg.distributed_init_method.startswith("tcp://localhost:")
    assert cfg.distributed_num_procs == 3
    alone = group()
    distributed.infer_init_method(alone, force_distributed=True)
    assert alone.distributed_init_method.startswith("tcp://localhost:")


def test_what_the_config_says_stays(no_launcher: pytest.MonkeyPatch) -> None:
    cfg = group(distributed_init_method="tcp://there:1", distributed_world_size=2)
    no_launcher.setenv("RANK", "1")
    distributed.infer_init_method(cfg)
    assert (cfg.distributed_init_method, cfg.distributed_rank) == ("tcp://there:1", 0)


def test_torchruns_variables_are_followed(no_launcher: pytest.MonkeyPatch) -> None:
    for name, value in [
        ("MASTER_ADDR", "there"),
        ("MASTER_PORT", "1"),
        ("WORLD_SIZE", "4"),
        ("RANK", "3"),
        ("LOCAL_RANK", "1"),
    ]:
        no_launcher.setenv(name, value)
    cfg = group()
    distributed.infer_init_method(cfg)
    assert cfg.distributed_init_method == "env://"
    assert cfg.distributed_no_spawn
    found = (cfg.distributed_world_size, cfg.distributed_rank, cfg.device_id)
    assert found == (4, 3, 1)


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, tasks: int) -> None:
    """SLURM's variables for two nodes, and the program that lists their names."""
    program = folder / "scontrol"
    program.write_text("#!/bin/sh\nprintf 'one\\ntwo\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name, value in [
        ("STEP_NODELIST", "one,two"),
        ("NNODES", "2"),
        ("NODEID", "1"),
        ("NTASKS", str(tasks)),
        ("PROCID", "3"),
        ("LOCALID", "1"),
    ]:
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_slurm_has_a_task_a_worker(
    tmp_path: Path, no_launcher: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, no_launcher, tasks=4)
    cfg = group(distributed_port=9218, distributed_world_size=4)
    distributed.infer_init_method(cfg)
    assert cfg.distributed_init_method == "tcp://one:9218"
    assert cfg.distributed_no_spawn
    assert (cfg.distributed_rank, cfg.device_id) == (3, 1)
    with pytest.raises(ValueError, match="SLURM has started 4 tasks"):
        distributed.infer_init_method(
            group(distributed_port=9218, distributed_world_size=8)
        )


def test_slurm_has_a_task_a_node(
    tmp_path: Path, no_launcher: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, no_launcher, tasks=2)
    cfg = group(distributed_port=9218, distributed_world_size=8)
    distributed.infer_init_method(cfg)
    assert (cfg.distributed_rank, cfg.distributed_num_procs) == (4, 4)
    assert not cfg.distributed_no_spawn
    with pytest.raises(ValueError, match="no multiple of SLURM's 2 nodes"):
        distributed.infer_init_method(
            group(distributed_port=9218, distributed_world_size=7)
        )


def test_joining_without_an_address_is_rejected() -> None:
    cfg = SimpleNamespace(
        distributed_training=group(), common=SimpleNamespace(cpu=True)
    )
    with pytest.raises(ValueError, match=r"call infer_init_method\("):
        distributed.distributed_init(cfg)


def test_one_worker_runs_here_and_hands_back_what_main_returns(
    no_launcher: pytest.MonkeyPatch,
) -> None:
    cfg = SimpleNamespace(distributed_training=group())
    result = distributed.call_main(cfg, lambda cfg, word: (cfg, word), word="yes")
    assert result == (cfg, "yes")


def spawn(
    folder: Path, word: str, no_launcher: Any
) -> subprocess.CompletedProcess[str]:
    return run_alone("fairseq.spawned", str(folder), word)


def test_several_workers_are_started_and_meet(
    tmp_path: Path, no_launcher: pytest.MonkeyPatch
) -> None:
    done = spawn(tmp_path, "work", no_launcher)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / r).read_text() for r in "01"] == ["gloo 3.0", "gloo 3.0"]


def test_a_worker_waits_for_the_slowest_before_it_leaves(
    tmp_path: Path, no_launcher: pytest.MonkeyPatch
) -> None:
    done = spawn(tmp_path, "slow", no_launcher)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "threads0").read_text() == "slow"


def test_a_worker_that_fails_ends_the_others_and_is_named(
    tmp_path: Path, no_launcher: pytest.MonkeyPatch
) -> None:
    done = spawn(tmp_path, "fail", no_launcher)
    assert done.returncode != 0
    assert "rank 1 has had enough" in done.stderr
    # A thread of gloo that releases a tensor later than this ends the process by an
    # abort, so that its parent may see that in place of the exception.
    assert (tmp_path / "threads1").read_text() == ""


def test_heartbeat_timeout_is_that_of_collectives_in_shared_memory(
    tmp_path: Path,
) -> None:
    first = ranks.run(tmp_path, "fairseq.heartbeat")[0]
    assert first.code == 0, first.output
    error, seconds = first.told
    assert "did not come within 2 seconds" in error
    assert seconds < 6
