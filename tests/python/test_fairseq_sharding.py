"""fairseq's Trainer with --ddp-backend fully_sharded, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fairseq_tiny as tiny
import pytest
import torch
from ranks import GLOO, run_ranks, told

from tests import fairseq_program as program

SHARDED = {"distributed_training__ddp_backend": "fully_sharded"}
CLIP = {"optimization__clip_norm": 0.5}
BODY = """
import fairseq_tiny as tiny

two = {"distributed_training__distributed_world_size": world,
       "distributed_training__ddp_backend": "fully_sharded",
       "optimization__clip_norm": 0.5}
groups = tiny.groups(tiny.batches(8), 1)
mine = groups[rank::world]
told = {}

def run(name, **options):
    ours = tiny.trainer(**two, **options)
    outputs = [ours.train_step(update) for update in mine[:3]]
    path = f"{folder}/{name}.pt"
    state = ours.state_dict() if rank else ours.save_checkpoint(path, {"epoch": 3})
    dist.barrier()
    again = tiny.trainer(**two, **options)
    extra = again.load_checkpoint(path)
    told[name] = {
        "losses": [o["loss"] for o in outputs],
        "sharded": sum(p.numel() for p in ours.model.parameters()),
        "extra": extra["epoch"],
        "last": [t.train_step(mine[3])["loss"] for t in (ours, again)],
        "same": all(torch.equal(a, b) for a, b in zip(
            ours.model.state_dict().values(), again.model.state_dict().values())),
        "valid": ours.valid_step(mine[3][0])["loss"],
    }

run("flat")
run("apart", distributed_training__not_fsdp_flatten_parameters=True,
    distributed_training__no_reshard_after_forward=True)
tell(told)
"""


def alone(n: int) -> Any:
    """One process that takes the batches of both."""
    ours = tiny.trainer(**CLIP)
    losses = [ours.train_step(u)["loss"] for u in tiny.groups(tiny.batches(8), 2)[:n]]
    return ours, losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    return told(run_ranks(folder, GLOO + BODY))


@pytest.mark.parametrize("name", ["flat", "apart"])
def test_two_processes_train_resume_and_save_as_one_would(
    ranks: list[Any], name: str, folder: Path
) -> None:
    ours, losses = alone(4)
    count = sum(p.numel() for p in ours.get_model().parameters())
    for found in (rank[name] for rank in ranks):
        assert found["losses"] == pytest.approx(losses[:3], rel=1e-5)
        assert found["last"] == pytest.approx([losses[3]] * 2, rel=1e-5)
        assert found["same"]
        assert found["extra"] == 3
        assert count / 2 <= found["sharded"] <= count / 2 + 4
    saved = torch.load(folder / f"{name}.pt", weights_only=True)
    expected, _ = alone(3)
    for key, value in expected.get_model().state_dict().items():
        torch.testing.assert_close(saved["model"][key], value, rtol=1e-4, atol=2e-5)
    resumed = tiny.trainer(**CLIP)
    resumed.load_checkpoint(str(folder / f"{name}.pt"))
    update = tiny.groups(tiny.batches(8), 2)[3]
    assert resumed.train_step(update)["loss"] == pytest.approx(losses[3], rel=1e-5)


def test_one_process_may_shard_too(tmp_path: Path) -> None:
    sharded, plain = tiny.trainer(**SHARDED, **CLIP), tiny.trainer(**CLIP)
    for update in tiny.groups(tiny.batches(4), 2):
        losses = [t.train_step(update)["loss"] for t in (sharded, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    state = sharded.model.state_dict()
    for name, value in plain.get_model().state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_the_program_logs_and_saves_the_same_with_sharding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With tied embeddings, validated and saved once."""
    data = program.preprocess(tmp_path)
    logs, saved = [], []
    for backend in ("pytorch_ddp", "fully_sharded"):
        arguments = program.lm_arguments(
            data, tmp_path / backend, "--max-epoch", "1", "--ddp-backend", backend
        )
        logs.append(program.train(caplog, arguments))
        path = tmp_path / backend / "checkpoint_last.pt"
        saved.append(torch.load(path, weights_only=True)["model"])
    assert len(logs[0]) > 2
    for (name, plain), (other, sharded) in zip(*logs, strict=True):
        assert name == other
        for key, value in plain.items():
            assert float(sharded[key]) == pytest.approx(float(value), abs=2e-3)
    assert saved[0].keys() == saved[1].keys()
    for name, value in saved[0].items():
        if "k_proj.bias" not in name:  # of gradient 0: Adam makes steps of its rounding
            torch.testing.assert_close(saved[1][name], value, rtol=1e-3, atol=1e-5)


def test_a_criterion_with_parameters_is_refused() -> None:
    criterion = tiny.Criterion()
    criterion.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="the criterion has parameters"):
        tiny.trainer(criterion=criterion, **SHARDED).train_step(tiny.batches(1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"common__fp16": True}, "common.fp16 does not go with"),
        ({"common__bf16": True}, "not compatible with --bf16"),
        ({"ema__store_ema": True}, "ema.store_ema does not go with"),
        ({"distributed_training__use_sharded_state": True}, "use_sharded_state"),
        ({"distributed_training__zero_sharding": "os"}, "--zero-sharding"),
    ],
)
def test_what_does_not_go_with_sharding_is_named(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        tiny.trainer(**SHARDED, **changes)
    with pytest.raises(ValueError, match="requires --ddp-backend=fully_sharded"):
        tiny.trainer(distributed_training__cpu_offload=True)
