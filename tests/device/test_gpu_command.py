"""make gpu on the emulated device: its stages run, go on after a failure and resume."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import any_gpu
import pytest
from draws import EXHAUSTIVE
from places import ROOT

pytestmark = pytest.mark.skipif(any_gpu.REAL, reason="rehearses without a GPU")

STAGES = ["versions", "bandwidth", "updates"]
STAGES += ["steps", "kernels"] if EXHAUSTIVE else []


def rehearsed(out: Path, *options: str) -> str:
    command = [sys.executable, "benchmarks/gpu.py", "--emulated", "--out", str(out)]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_stages_run_once(tmp_path: Path) -> None:
    first = rehearsed(tmp_path, "--only", *STAGES)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["stages"]) == [s for s in found["stages"] if s in STAGES]
    for name in STAGES:
        assert f"==> {name}" in first
        assert found["stages"][name]["became"] == "passed"
    rows = [r for s in found["stages"].values() for r in s["rows"] if "ratio" in r]
    assert {r["benchmark"] for r in rows} >= {
        "gpu_kernels",
        "gpu_updates",
        "checkpoint",
    }
    assert all(r["ours"] > 0 and r["theirs"] > 0 for r in rows)
    assert "norm, 2, fp32" in (tmp_path / "gpu.log").read_text()
    again = rehearsed(tmp_path, "--only", *STAGES, "--again", "versions")
    assert again.count("==>") == 1
    assert "==> versions" in again


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("gpu")


def test_what_fails_or_takes_too_long_is_told(gpu: Any, tmp_path: Path) -> None:
    late = tmp_path / "late"
    row = ["echo", '{"name": "a", "ratio": 2}']
    hang = ["sh", "-c", f"(sleep 3; touch {late}) & wait"]
    slow = ["sh", "-c", "trap 'echo so far; exit' INT; sleep 60 & wait"]
    with open(tmp_path / "log", "ab") as log:
        words = ["echo", '{"name": "a", "ratio": nan}']  # no JSON
        commands = [row, words, ["sh", "-c", "exit 3"], ["/no/such"], row]
        failed = gpu.run_stage(gpu.Stage(1, commands), log)
        stopped = gpu.run_stage(gpu.Stage(1 / 60, [hang]), log)
        asked = gpu.run_stage(gpu.Stage(1 / 60, [slow]), log)
    assert failed["became"] == "failed with 3"
    assert failed["rows"] == [{"name": "a", "ratio": 2}] * 2
    assert stopped["became"] == "was stopped at its limit"
    assert asked["became"] == stopped["became"]
    assert asked["end"].endswith("so far\n")  # as pytest's failures
    time.sleep(3)
    assert not late.exists()  # what it had started ended with it


def test_a_page_gets_the_table(gpu: Any, tmp_path: Path) -> None:
    row = {"name": "norm", "unit": "GB/s", "ours": 90.0, "peer": "a copy",
           "theirs": 100.0, "ratio": 0.9, "goal": 0.92}  # fmt: skip
    done = {"became": "passed", "seconds": 1, "rows": [row], "end": ""}
    found = {"device": "GPU X", "torch": "torch 2", "stages": {"bandwidth": done}}
    page = tmp_path / "page.md"
    page.write_text(f"a\n{gpu.BEGIN}\nold\n{gpu.END}\nb\n")
    gpu.report.rewrite(page, gpu.table(found), gpu.BEGIN, gpu.END)
    text = page.read_text()
    assert "Measured on one GPU X, torch 2.\n" in text
    assert "old" not in text
    assert "| norm | 90 GB/s | 100 GB/s | a copy | 0.9 | 0.92, missed |" in text
    found["stages"]["steps"] = {**done, "became": "failed with 1", "rows": []}
    assert "not complete: steps" in gpu.table(found)
