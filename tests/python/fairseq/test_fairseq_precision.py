"""fairseq's precision modes on the CPU: which numbers they make, and their scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import fairseq_tiny as tiny
import pytest
import torch

from ctrainer.fairseq import metrics, optim

MODES: dict[str, dict[str, Any]] = {
    "fp16": {"common__fp16": True},
    "fp16-no-flatten": {"common__fp16": True, "common__fp16_no_flatten_grads": True},
    "fp16-memory-efficient": {
        "common__fp16": True,
        "common__memory_efficient_fp16": True,
    },
    "bf16": {"common__bf16": True},
    "bf16-memory-efficient": {
        "common__bf16": True,
        "common__memory_efficient_bf16": True,
    },
    "amp": {"common__amp": True},
}
NAMES = {
    "fp16": "FP16Optimizer",
    "fp16-no-flatten": "FP16Optimizer",
    "fp16-memory-efficient": "MemoryEfficientFP16Optimizer",
    "bf16": "FP16Optimizer",
    "bf16-memory-efficient": "MemoryEfficientFP16Optimizer",
    "amp": "AMPOptimizer",
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_it_learns_and_has_the_originals_name(mode: str) -> None:
    ours = tiny.trainer(**MODES[mode], optimization__clip_norm=1.0)
    sample = tiny.batches(1)
    losses = [ours.train_step(sample) for _ in range(20)]
    assert type(ours.optimizer).__name__ == NAMES[mode]
    first, last = losses[0], losses[-1]
    assert first is not None
    assert last is not None
    assert last["loss"] < first["loss"] - 0.5


@pytest.mark.parametrize("mode", ["fp16", "fp16-memory-efficient", "amp"])
def test_the_scale_is_undone_before_the_norm(mode: str) -> None:
    norms = []
    for changes in (MODES[mode], {}):
        ours = tiny.trainer(**changes)
        ours.train_step(tiny.batches(2))
        norms.append(metrics.get_smoothed_value("train", "gnorm"))
    # fp16's 11 bits: 2 ** -11 for each of the roundings from weights to gradients.
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    ours = tiny.trainer(**MODES[mode])
    ours.train_step(tiny.batches(1))
    assert metrics.get_smoothed_value("train", "loss_scale") == 128


def test_fp16_updates_a_float32_copy_and_rounds_it() -> None:
    ours = tiny.trainer(common__fp16=True)
    for sample in tiny.batches(5):
        ours.train_step([sample])
    masters = ours.optimizer.fp32_params
    assert len(masters) == 3
    for p, master in zip(ours.optimizer.params, masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(p, master.half())
        assert not torch.equal(p.float(), master)


def test_an_overflow_halves_the_scale_and_skips_the_update() -> None:
    ours = tiny.trainer(common__fp16=True, common__fp16_init_scale=2.0**7)
    good = tiny.batches(1)[0]
    bad = good | {"factor": torch.tensor(1e6)}
    ours.train_step([good])
    before = [p.clone() for p in ours.model.parameters()]
    assert ours.train_step([bad]) is None
    assert ours.get_num_updates() == 1
    assert ours.optimizer.scaler.loss_scale == 64
    assert metrics.get_smoothed_value("train", "loss_scale") == 64
    for old, new in zip(before, ours.model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert new.grad is None


def test_a_scale_at_its_minimum_is_an_error() -> None:
    ours = tiny.trainer(
        common__fp16=True, common__fp16_init_scale=1.0, common__min_loss_scale=0.5
    )
    bad = tiny.batches(1)[0] | {"factor": torch.tensor(1e8)}
    with pytest.raises(FloatingPointError, match="Minimum loss scale reached"):
        ours.train_step([bad])


def test_the_window_follows_update_freq_or_is_given() -> None:
    ours = tiny.trainer(common__fp16=True, optimization__update_freq=[4])
    core = ours.optimizer.scaler.core
    scales = [core.update(False) for _ in range(2**14 // 4)]
    assert scales[-3:] == [128, 128, 256]
    ours = tiny.trainer(common__fp16=True, optimization__update_freq=[4, 2])
    with pytest.raises(ValueError, match="--fp16-scale-window must be given"):
        _ = ours.optimizer


def test_what_a_precision_excludes_is_rejected() -> None:
    changes = {"common__fp16": True, "optimizer___name": "adagrad"}
    with pytest.raises(RuntimeError, match="Adagrad does not support flat params"):
        _ = tiny.trainer(**changes).optimizer
    _ = tiny.trainer(**changes, common__fp16_no_flatten_grads=True).optimizer
    with pytest.raises(ValueError, match="Unsupported optimizer: Adagrad"):
        _ = tiny.trainer(**changes, common__memory_efficient_fp16=True).optimizer


def test_amp_tries_a_batch_again_and_then_leaves_it(tmp_path: Path) -> None:
    task = tiny.Task()
    ours = tiny.trainer(
        task=task, common__amp=True, common__amp_batch_retries=2,
        checkpoint__save_dir=str(tmp_path),
    )  # fmt: skip
    bad = tiny.batches(1)[0] | {"factor": torch.tensor(float("inf"))}
    assert ours.train_step([bad]) is None
    assert len(task.seen) == 3
    assert ours.get_num_updates() == 0
    assert ours.optimizer.scaler.get_scale() == 128 / 2**3
    assert len(metrics.get_active_aggregators()) == 1
    ours._amp_retries = "two"
    with pytest.raises(TypeError, match="not supported between"):
        ours.train_step([bad])
    assert len(task.seen) == 4


def test_clipping_by_fp16s_rule_has_no_epsilon() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    made = optim.build_precise_optimizer(tiny.config(common__fp16=True), [parameter])
    made.zero_grad()
    made.backward((parameter * 3).sum())
    assert made.clip_grad_norm(1.5).item() == 6.0
    assert made.divisor == 128 * 6.0 / 1.5


def test_the_plain_rule_is_fairseqs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    made = optim.build_optimizer(tiny.config().optimizer, [parameter])
    made.zero_grad()
    made.backward((parameter * 3).sum())
    made.multiply_grads(0.5)
    assert made.clip_grad_norm(1.0).item() == 3.0
    assert made.divisor == pytest.approx(2 * (3 + 1e-6), rel=1e-15)
    assert math.isclose(made.get_lr(), 0.02)


def test_the_norm_of_all_processes_takes_the_place_of_this_ones() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    made = optim.build_optimizer(tiny.config().optimizer, [parameter])
    made.zero_grad()
    made.backward((parameter * 3).sum())
    assert made.clip_grad_norm(1.0, lambda norm: 2 * norm).item() == 12.0
    assert made.divisor == pytest.approx(12 + 1e-6, rel=1e-15)

    def lost(norm: torch.Tensor) -> torch.Tensor:
        raise ConnectionError(f"no answer for {norm.item()}")

    with pytest.raises(ConnectionError, match=r"no answer for 0\.49"):
        made.clip_grad_norm(1.0, lost)
