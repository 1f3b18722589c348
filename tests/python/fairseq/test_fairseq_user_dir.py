"""--user-dir: tasks, models and criterions of a user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fairseq_program as program
import pytest
from places import ROOT

from ctrainer.fairseq.utils import import_user_module

# As a user of fairseq has it: a task and a model of the old kind, which declare their
# options with argparse, and a criterion with a dataclass; and where they lie.
PROGRAMS = ROOT / "tests/programs/fairseq/user_dir"
FILES = {
    "tasks.py": "tasks/mine.py", "models.py": "models/mine.py", "losses.py": "losses.py"
}  # fmt: skip


def plugin(folder: Path, package: str) -> Path:
    """A folder of that code: its __init__.py imports nothing but what registers."""
    for name, path in FILES.items():
        text = (
            (PROGRAMS / name).read_text().replace("from fairseq.", f"from {package}.")
        )
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "__init__.py").write_text("from . import losses\n")
    return folder


@pytest.mark.parametrize("package", ["fairseq", "ctrainer.fairseq"])
def test_a_folder_of_a_users_own_is_trained(tmp_path: Path, package: str) -> None:
    data = program.preprocess(tmp_path)
    folder = plugin(tmp_path / "my_plugin", package)
    options = f"""fairseq-train {data} --user-dir {folder} --task lines
        --most-words 12 --arch bigrams_wide --criterion scaled --scale 0.5
        --batch-size 16 --optimizer adam --lr 0.05 --max-epoch 3 --cpu --num-workers 0
        --log-format json --save-dir {tmp_path / "out"}"""
    done = subprocess.run(
        [sys.executable, "-m", "ctrainer", *options.split()], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "width 24" in done.stdout
    lines = program.numbers_of_output(done.stdout)
    losses = [float(s["valid_loss"]) for name, s in lines if name == "valid"]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0] < 0.5 * 4.4  # bits of 21 words, halved
    assert {s["valid_scaled"] for name, s in lines if name == "valid"} == {"1"}


def test_a_folder_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    class Options:
        user_dir = str(tmp_path / "nowhere")

    with pytest.raises(FileNotFoundError, match="nowhere: there is no such folder"):
        import_user_module(Options)
    Options.user_dir = str(tmp_path / "json")  # a module of the standard library
    (tmp_path / "json").mkdir()
    with pytest.raises(ImportError, match="rename the folder"):
        import_user_module(Options)
