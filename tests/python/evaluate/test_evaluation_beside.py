"""Checkpoints that another process evaluates have the metrics of the run's evaluations:
what docs/how-to/evaluate_beside.md says."""

import os
from pathlib import Path

import pytest
from ranks import run, told

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from programs.evaluate.beside import DROPOUT, metrics_of  # noqa: E402
from tiny import arguments, gpt2, tokens  # noqa: E402

import ctrainer  # noqa: E402


def plain(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k in ("eval_loss", "eval_spread")}


def test_a_second_process_gets_the_metrics_of_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = arguments(
        output_dir=str(out), max_steps=6, save_strategy="steps", save_steps=2,
        eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer = ctrainer.Trainer(
        gpt2(**DROPOUT), args, train_dataset=tokens(), eval_dataset=tokens(10),
        compute_metrics=metrics_of,
    )  # fmt: skip
    trainer.train()
    logged = [plain(e) for e in trainer.state.log_history if "eval_loss" in e]
    steps = [2, 4, 6]
    assert sorted(os.listdir(out)) == [f"checkpoint-{s}" for s in steps]
    (found,) = told(run(tmp_path, "evaluate.beside", 1, run=str(out)))
    assert [plain(found[str(s)]) for s in steps] == logged
    assert [s for s, _ in found["history"]] == steps
    assert len({m["eval_loss"] for m in logged}) == 3
