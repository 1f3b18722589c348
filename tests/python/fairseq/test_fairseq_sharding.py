"""fairseq's Trainer with --ddp-backend fully_sharded, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fairseq_program as program
import fairseq_tiny as tiny
import pytest
import torch
from ranks import run, told

from ctrainer.fsdp import consolidate_sharded_model_checkpoints

SHARDED = {"distributed_training__ddp_backend": "fully_sharded"}
CLIP = {"optimization__clip_norm": 0.5}


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
    return told(run(folder, "fairseq.sharding"))


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


@pytest.mark.parametrize(
    ("name", "rel", "optimizer"),
    [
        # 11 bits of mantissa in what is computed, of which sums are taken.
        ("fp16", 2e-3, "MemoryEfficientFP16Optimizer"),
        # float32 shards beside weights of 16 bits that take no smaller steps.
        ("memory_efficient_fp16", 5e-3, "MemoryEfficientFP16Optimizer"),
        ("bf16", 2e-2, "MemoryEfficientFP16Optimizer"),
        ("amp", 1e-6, "AMPOptimizer"),
    ],
)
def test_every_precision_trains_as_with_whole_models(
    ranks: list[Any], name: str, rel: float, optimizer: str
) -> None:
    for rank in ranks:
        whole, sharded = rank[name]["pytorch_ddp"], rank[name]["fully_sharded"]
        assert sharded["updates"] == whole["updates"] == (4 if name == "bf16" else 3)
        made, expected = ([loss for loss in run["losses"] if loss is not None]
                          for run in (sharded, whole))  # fmt: skip
        assert len(made) == len(expected) == whole["updates"]
        assert made == pytest.approx(expected, rel=rel)
        assert sharded["optimizer"] == optimizer
        assert sharded["dtypes"] == ["torch.float32"]


def test_a_run_under_a_loss_scale_goes_on_from_the_whole_state(
    ranks: list[Any],
) -> None:
    for rank in ranks:
        scaled = rank["scaled"]
        assert scaled["last"][0] == scaled["last"][1]
        assert scaled["same"]
        assert scaled["scale"] == [4.0, 4.0]


@pytest.mark.parametrize("name", ["zero", "zero_fp16", "zero_in_place"])
def test_workers_may_share_out_the_state_of_the_optimizer(
    ranks: list[Any], name: str
) -> None:
    """With the update's arithmetic, but for gradients that are divided before it, which
    rounds them once more, to 11 bits where they are of 16. Losses are logged to 1e-3,
    weights are below 1."""
    far = 1e-6 if name == "zero" else 2**-11
    for found in (rank[name] for rank in ranks):
        whole, shared = found["losses"]
        assert shared == pytest.approx(whole, abs=1e-3)
        assert 0 < found["own"] < found["all"]
        to_the_bit = found["resumed"][f"{name}-os os"]
        assert to_the_bit[0] == found["last"][1]
        assert to_the_bit[2] == 0.0
        for loss, *apart in found["resumed"].values():
            assert loss == pytest.approx(found["last"][0], abs=1e-3)
            assert max(apart) <= far
    assert sum(r[name]["own"] for r in ranks) == ranks[0][name]["all"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimization__use_bmuf": True}, "--use-bmuf does not go with"),
        ({"distributed_training__ddp_backend": "slowmo"}, "slowmo does not go with"),
        ({"optimizer___name": "composite"}, "composite does not go with"),
        ({"common__fp16": True}, "Please use --fp16-no-flatten-grads"),
        ({"distributed_training__zero_sharding": "grads"}, "expected none or os"),
    ],
)
def test_what_does_not_go_with_shared_state_is_named(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        tiny.trainer(**{"distributed_training__zero_sharding": "os", **changes})


def test_a_run_in_codes_goes_on_with_what_they_have_missed(
    ranks: list[Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in ranks:
        assert rank["codes"]["last"][0] == rank["codes"]["last"][1]
        assert rank["codes"]["same"]
    saved = torch.load(folder / "codes.pt", weights_only=True)
    missed = saved["extra_state"]["residuals"]
    assert [any(v.any() for v in own.values()) for own in missed] == [True, True]
    own = torch.load(folder / "last-shard1.pt", weights_only=True)["extra_state"]
    assert len(own["residuals"]) == 1
    reduces = {"distributed_training__reduce_bits": 4}
    alone = tiny.trainer(**SHARDED, **reduces)
    alone.load_checkpoint(str(folder / "codes.pt"))
    assert "residuals of 2 processes, and these are 1" in caplog.text
    saved["extra_state"]["code_feedback"] = saved["extra_state"].pop("residuals")
    torch.save(saved, folder / "older.pt")
    caplog.clear()
    alone.load_checkpoint(str(folder / "older.pt"))
    assert "residuals of 2 processes, and these are 1" in caplog.text
    reduces["distributed_training__reduce_bits"] = 7
    with pytest.raises(ValueError, match=r"reduce_bits must .* in {4, 8, 32}, not 7"):
        tiny.trainer(**SHARDED, **reduces).train_step(tiny.batches(1))


def test_averages_of_sharded_weights_are_those_of_whole_ones(
    ranks: list[Any],
) -> None:
    for rank in ranks:
        whole, sharded = rank["ema"]["pytorch_ddp"], rank["ema"]["fully_sharded"]
        assert sharded["names"] == whole["names"]
        assert sharded["decay"] == whole["decay"] == 0.7
        for one, other in zip(sharded["ema"], whole["ema"], strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_each_process_goes_on_from_a_file_of_its_own(
    ranks: list[Any], folder: Path
) -> None:
    for rank in ranks:
        shards = rank["shards"]
        assert shards["wrote"]
        assert shards["epoch"] == 3
        assert shards["last"][0] == shards["last"][1]
        assert shards["same"] == [True, True]
        assert shards["scales"][0] == shards["scales"][1]
    whole = torch.load(folder / "whole.pt", weights_only=True)
    found, _ = consolidate_sharded_model_checkpoints(
        f"{folder}/last-shard", "*.pt", save_model=False
    )
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


def test_shards_of_other_processes_are_rejected(ranks: list[Any], folder: Path) -> None:
    alone = tiny.trainer(**SHARDED, distributed_training__use_sharded_state=True)
    with pytest.raises(Exception, match="process 0 of 2, and this is 0 of 1"):
        alone.load_checkpoint(f"{folder}/last-shard0.pt")


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


def test_a_criterion_with_parameters_is_rejected() -> None:
    criterion = tiny.Criterion()
    criterion.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="the criterion has parameters"):
        tiny.trainer(criterion=criterion, **SHARDED).train_step(tiny.batches(1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimization__use_bmuf": True}, "use_bmuf does not go with"),
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


def test_optimizers_that_look_at_whole_parameters_are_rejected() -> None:
    with pytest.raises(ValueError, match="FairseqLAMB is none"):
        tiny.trainer(**SHARDED, optimizer___name="lamb").train_step(tiny.batches(1))
