"""Trainer with DeepSpeed configurations, and with sharded_ddp, on 2 ranks: stages,
offload, precision."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import deepspeed_trainings as runs
import pytest
import ranks
import tiny
import torch
from torch import nn

import ctrainer
from ctrainer.arguments.fsdp import Sharding
from ctrainer.fsdp import trained_model
from ctrainer.runtime.torch_process import accelerator

# With AMX a product of float16 is rounded in other places on other counts of threads,
# which moves a norm of one process by 6e-5. On a GPU torch's AdamW rounds a parameter
# to the other bfloat16, which moves one by 3e-5.
_NEAR = {"fp32": 1e-6, "bf16": 1e-4 if accelerator() else 1e-6, "fp16": 2e-4}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks.told(ranks.run(tmp_path_factory.mktemp("zero"), "fsdp.deepspeed"))


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    return {dtype: runs.in_plain_torch(dtype) for dtype in runs.DTYPES}


@pytest.mark.parametrize("name", runs.CASES)
def test_two_ranks_train_as_plain_torch_does_in_one_process(
    found: list[Any], wanted: dict[str, Any], name: str
) -> None:
    stage, _, dtype = runs.CASES[name]
    for rank in found:
        ours, theirs = rank[name], wanted[dtype]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=_NEAR[dtype])
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=_NEAR[dtype])
        assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12)
        assert ours["sharded"] == (stage > 0)
        assert (ours["stage"], ours["optimizer"]) == (stage, "AdamW")
        assert len(ours["groups"]) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layers_compute_under_autocast_in_stage_0_alone(stage: int, dtype: str) -> None:
    """As under DeepSpeed, where a LayerNorm of a GPU is not one of float32."""
    model, seen = runs.tiny.gpt2(), set()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        kind = output.device.type
        seen.add((torch.is_autocast_enabled(kind), module.weight.dtype, output.dtype))

    model.transformer.ln_f.register_forward_hook(look)
    config = {"zero_optimization": {"stage": stage}, dtype: {"enabled": True}}
    made = runs.tiny.make(
        ctrainer.Trainer, model, runs.tiny.tokens(4), max_steps=1, deepspeed=config,
        **{dtype: True},
    )  # fmt: skip
    made.train()
    made.evaluate(runs.tiny.tokens(2))
    low = runs.DTYPES[dtype]
    if stage > 0:
        assert seen == {(False, low, low)}
    else:
        assert {look[:2] for look in seen} == {(True, torch.float32)}


def test_state_on_nvme_gives_the_bits_of_state_in_memory_and_is_saved_whole(
    found: list[Any],
) -> None:
    shared = 2 * sum(p.numel() for p in runs.tiny.gpt2().parameters())
    assert sum(rank["3 nvme fp32"]["in a file"] for rank in found) >= shared
    for rank in found:
        here, there = rank["3 none fp32"], rank["3 nvme fp32"]
        assert here["in a file"] == 0
        resumed = rank["resumed 3 nvme fp32"]
        for name in ("losses", "norms"):
            assert there[name] == here[name] == resumed[name]
        assert resumed["in a file"] == there["in a file"]
        assert "make the folder, or mount the drive" in rank["missing"]


def test_shards_on_nvme_give_the_bits_of_shards_in_memory(found: list[Any]) -> None:
    shared = sum(p.numel() for p in runs.tiny.gpt2().parameters())
    assert sum(r["3 nvme shards fp32"]["shards in files"] for r in found) >= shared
    for rank in found:
        here, there = rank["3 none fp32"], rank["3 nvme shards fp32"]
        resumed, some = rank["resumed 3 nvme shards fp32"], rank["in memory"]
        assert here["shards in files"] == rank["3 nvme fp32"]["shards in files"] == 0
        assert resumed["shards in files"] == there["shards in files"]
        assert resumed["in a file"] == there["in a file"] > 0
        left = there["shards in files"] - some["shards in files"]
        assert 0 < left <= runs.IN_MEMORY
        for name in ("losses", "norms"):
            assert there[name] == here[name] == resumed[name] == some[name]


@pytest.mark.parametrize("name", runs.FAIRSCALE)
def test_sharded_ddp_trains_as_plain_torch_does_in_one_process(
    found: list[Any], wanted: dict[str, Any], name: str
) -> None:
    words, dtype = name.rsplit(" ", 1)
    for rank in found:
        ours, theirs = rank[name], wanted[dtype]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=_NEAR[dtype])
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=_NEAR[dtype])
        assert ours["units"] == (3 if "auto_wrap" in words else 1)


def test_parameters_are_shared_by_as_many_ranks_as_mics_shard_size_says(
    found: list[Any], wanted: dict[str, Any]
) -> None:
    for rank in found:
        ours = rank["groups of one"]
        assert ours["losses"] == pytest.approx(wanted["fp32"]["losses"], rel=1e-6)
        assert ours["shares"] == 1
        assert rank["zero_dp_3 auto_wrap offload fp32"]["shares"] == 2
        assert (
            "mics_shard_size=3 does not divide the 2 ranks" in rank["groups of three"]
        )


def test_the_hidden_size_decides_what_is_auto_before_an_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("prefetch_bucket_size", "param_persistence_threshold")
    section = {"stage": 3, **{f"stage3_{name}": "auto" for name in names}}
    size, rows = 32, [{**row, "other": 1} for row in tiny.tokens(8)]
    made = tiny.make(
        ctrainer.Trainer, tiny.gpt2(n_embd=size), rows, max_steps=1,
        output_dir=str(tmp_path), deepspeed={"zero_optimization": section},
    )  # fmt: skip
    loss = made.evaluate(tiny.tokens(4))["eval_loss"]
    plan = made._sharding
    # transformers' formulas
    assert plan.prefetch_numel == int(0.9 * size * size)
    assert plan.unnamed_min_num_params == 10 * size
    handler = made.callback_handler
    assert handler.model is made.model is made.model_wrapped
    assert [u.forward_prefetch for u in made.model.units()] == [False] * 3
    next(iter(made.get_train_dataloader()))
    assert "since GPT2LMHeadModel.forward takes no such argument" in caplog.text
    expected = tiny.make(
        ctrainer.Trainer, tiny.gpt2(n_embd=size), tiny.tokens(8), max_steps=1,
        output_dir=str(tmp_path),
    )  # fmt: skip
    assert loss == pytest.approx(expected.evaluate(tiny.tokens(4))["eval_loss"])


def test_units_and_what_is_prefetched_follow_the_numbers_of_parameters() -> None:
    inner = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 100))  # 110 and 1,100
    model = nn.Sequential(inner, nn.Linear(100, 3))
    for least, sizes in ((100, [110, 303, 1100]), (1000, [1100]), (5000, [])):
        plan = Sharding(unnamed_min_num_params=least)
        chosen = trained_model.choose(model, plan)
        units = [m for m in model.modules() if id(m) in chosen]
        assert sorted(sum(p.numel() for p in m.parameters()) for m in units) == sizes
    # PEFT's prompts have the base model's embeddings as a child, too.
    alias = nn.ModuleDict({"model": nn.Sequential(inner), "table": inner[1]})
    assert not trained_model.choose(alias, Sharding(min_num_params=1200))
    del alias["table"]
    assert id(inner) in trained_model.choose(alias, Sharding(min_num_params=1200))
    both = {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"}
    plan = Sharding(unnamed_min_num_params=100, prefetch_numel=1100, **both)
    chosen = trained_model.choose(model, plan)
    assert trained_model._within_limit(plan, model, chosen) == plan
    limited = dataclasses.replace(plan, prefetch_numel=1099)
    off = trained_model._within_limit(limited, model, chosen)
    assert (off.forward_prefetch, off.backward_prefetch) == (False, None)
