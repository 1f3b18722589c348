"""The crash.pt of fairseq-train is repeated from the file alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fairseq_program as program
import pytest
from places import ROOT

from ctrainer.__main__ import main
from ctrainer.adapters.torch_fairseq import load_file, save_file
from ctrainer.fairseq import metrics

# Registers a criterion that fails at the third update, once a run has got so far.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run is started, which names its data by a relative path."""
    program.preprocess(tmp_path)
    monkeypatch.chdir(tmp_path)
    metrics.reset()
    return tmp_path


def crashed(kind: type[Exception], *more: str) -> Path:
    """The file that a run leaves, which fails with `kind`."""
    arguments = program.lm_arguments(Path("bin"), Path("saved"), *more)
    with pytest.raises(kind):
        main(arguments)
    return Path("saved/crash.pt").absolute()


def _diverging(*more: str) -> Path:
    """Of a run whose first update makes weights that no float32 sum holds."""
    return crashed(FloatingPointError, "--lr", "1e30", "--warmup-updates", "0", *more)


def test_numbers_that_are_not_finite_are_found_again(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By the command as users have it, from another folder."""
    crash = _diverging("--dropout", "0.3")
    done = subprocess.run(
        [sys.executable, "-m", "ctrainer", "replay", str(crash)],
        cwd=tmp_path_factory.mktemp("elsewhere"), capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not finite: "), done.stdout


@pytest.mark.parametrize("more", [["--amp"], ["--bf16"], ["--store-ema"]])
def test_in_every_precision_and_with_an_average(
    folder: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    crash = _diverging(*more)
    capsys.readouterr()
    assert main(["replay", str(crash)]) == 0
    assert "not finite: " in capsys.readouterr().out


def test_an_exception_of_a_user_s_own_criterion_is_raised_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = folder / "fragile_plugin"
    plugin.mkdir()
    shutil.copy(
        ROOT / "tests/programs/fairseq/user_dir/fragile.py", plugin / "__init__.py"
    )
    options = ["--user-dir", "fragile_plugin", "--criterion", "fragile"]
    crash = crashed(RuntimeError, *options, "--most", "0")
    words = load_file(str(crash))["crash"]["samples"][0]["ntokens"]
    capsys.readouterr()
    assert main(["replay", str(crash)]) == 0
    shown = capsys.readouterr().out
    assert f"raised in criterion: RuntimeError: {words} words" in shown


def test_a_file_of_no_failed_update_is_rejected(folder: Path) -> None:
    main(program.lm_arguments(Path("bin"), Path("saved"), "--max-update", "2"))
    with pytest.raises(SystemExit, match="holds no failed update"):
        main(["replay", "saved/checkpoint_last.pt"])


def test_a_run_that_was_no_fairseq_train_asks_for_a_function(folder: Path) -> None:
    crash = _diverging()
    state = load_file(str(crash))
    del state["cfg"]["task"]
    save_file(str(crash), state)
    with pytest.raises(SystemExit, match=r"no task\. Give --setup"):
        main(["replay", str(crash)])


def test_objects_that_could_run_code_are_not_made(folder: Path) -> None:
    crash = _diverging()
    state = load_file(str(crash))
    state["crash"]["rng"] = Path("a")
    save_file(str(crash), state)
    with pytest.raises(ValueError, match="no plain data"):
        main(["replay", str(crash)])
