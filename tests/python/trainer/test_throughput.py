"""Tokens a second and MFU in the log, held against a recount."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import gpt2, make, tokens

import ctrainer
from ctrainer.adapters.peak import PEAK_TFLOPS, device_peak, peak_of

LENGTH = 12


def trained(folder: Path, **options: Any) -> tuple[ctrainer.Trainer, Any, float]:
    """A run of 6 updates of 4 rows, what train() returned, and its seconds."""
    args = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 2}
    trainer = make(
        ctrainer.Trainer, gpt2(), tokens(length=LENGTH),
        output_dir=str(folder), **{**args, **options},
    )  # fmt: skip
    begin = time.perf_counter()
    output = trainer.train()
    return trainer, output.metrics, time.perf_counter() - begin


def test_mfu_is_of_the_operations_that_were_done(tmp_path: Path) -> None:
    trainer, metrics, most = trained(
        tmp_path, peak_tflops=1e-3, include_num_input_tokens_seen=True
    )
    seconds, n_tokens = metrics["train_runtime"], 6 * 4 * LENGTH
    assert 0 < seconds <= most
    params = trainer.model.num_parameters(exclude_embeddings=True)
    assert metrics["total_flos"] == 6 * n_tokens * params
    mfu = metrics["total_flos"] / seconds / 1e9
    assert metrics["train_mfu"] == pytest.approx(mfu, rel=0.05)
    per_second = n_tokens / seconds
    assert metrics["train_tokens_per_second"] == pytest.approx(per_second, rel=0.05)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3
    for log in logs:
        done = 6 * params * log["step"] * 4 * LENGTH
        mfu = done / log["train_runtime"] / 1e9
        assert log["train_mfu"] == pytest.approx(mfu, rel=0.05)


def test_a_resumed_run_counts_its_own_operations(tmp_path: Path) -> None:
    args = {"peak_tflops": 1e-3, "save_strategy": "steps", "save_steps": 4}
    trained(tmp_path, **args, **{"max_steps": 4})
    trainer = make(
        ctrainer.Trainer, gpt2(), tokens(length=LENGTH), output_dir=str(tmp_path),
        max_steps=6, per_device_train_batch_size=4, **args,
    )  # fmt: skip
    metrics = trainer.train(resume_from_checkpoint=True).metrics
    own = metrics["total_flos"] * 2 / 6
    mfu = own / metrics["train_runtime"] / 1e9
    assert metrics["train_mfu"] == pytest.approx(mfu, rel=0.05)


def test_a_cpu_has_no_mfu_unless_asked(tmp_path: Path) -> None:
    trainer, metrics, _ = trained(tmp_path)
    assert metrics["total_flos"] > 0
    logs = [metrics, *trainer.state.log_history]
    assert not any({"train_mfu", "train_tokens_per_second"} & set(log) for log in logs)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_of_a_gpu(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
def test_the_table_is_of_bf16_and_fp16(
    dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    made = {"device": torch.device("cuda"), "bf16": dtype == "bf16"}
    args = SimpleNamespace(**made, fp16=dtype == "fp16", peak_tflops=None)
    assert device_peak(args) == (None if dtype is None else PEAK_TFLOPS["H200"])
    args.peak_tflops = 67
    assert device_peak(args) == 67.0
    args.peak_tflops, args.device = None, torch.device("cpu")
    assert device_peak(args) is None


@pytest.mark.parametrize("peak", [0, -1.0, float("nan"), "fast"])
def test_a_peak_is_a_positive_number(peak: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="peak_tflops"):
        ctrainer.TrainingArguments(str(tmp_path), peak_tflops=peak)
