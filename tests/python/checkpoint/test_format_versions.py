"""The versions of our formats, as docs/development/releases.md promises."""

import ast
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

import ctrainer
from ctrainer import Trainer, TrainingArguments
from ctrainer.checkpoint import verify_checkpoint

PAGE = (ROOT / "docs/development/releases.md").read_text()
KEPT = ROOT / "tests/kept/trainer/checkpoint-3"
OURS = ("ctrainer_manifest.json", "ctrainer_state.json")


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: Any, y: Any) -> dict[str, Any]:
        return {"loss": ((self.linear(x)[:, 0] - y) ** 2).mean()}


def trainer_in(folder: Path) -> Trainer:
    rows = [{"x": torch.ones(3), "y": torch.ones(())}] * 24
    args = TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=4, max_steps=4,
        save_steps=4, report_to=[], disable_tqdm=True, max_grad_norm=0.5,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    return Trainer(Line(), args, train_dataset=rows)


def promised(name: str) -> int:
    """The version in the page's row of the file."""
    found = re.search(rf'^\| `{re.escape(name)}`.*?\| `"version"` (\d+)', PAGE, re.M)
    assert found, name
    return int(found[1])


def version_of(folder: Path, name: str) -> int:
    return json.loads((folder / name).read_text())["version"]


def of_a_newer_release(folder: Path, name: str) -> None:
    """Give the file the next version, and a form that no reader of ours knows."""
    path = folder / name
    content = {"version": promised(name) + 1, "files": [["a", "b"]], "loss": "none"}
    path.write_text(json.dumps(content))
    if name != "ctrainer_manifest.json":
        (folder / "ctrainer_manifest.json").unlink()


@pytest.mark.parametrize("name", OURS)
def test_the_page_has_the_version_of_kept_and_new_files(
    name: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(KEPT, tmp_path / KEPT.name)
    trainer_in(tmp_path).train(resume_from_checkpoint=str(folder))
    versions = [version_of(tmp_path / "checkpoint-4", name), version_of(KEPT, name)]
    assert versions == [promised(name)] * 2


@pytest.mark.parametrize("name", OURS)
def test_a_newer_version_is_rejected_with_the_remedy(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(KEPT, tmp_path / KEPT.name)
    of_a_newer_release(folder, name)
    trainer = trainer_in(tmp_path)
    newer, ours = promised(name) + 1, promised(name)
    said = (
        f"{name}: has version {newer} of its format, and this ctrainer reads versions "
        f"up to {ours}: a newer release wrote it, so update ctrainer"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        trainer.train(resume_from_checkpoint=str(folder))
    assert [said in problem for problem in verify_checkpoint(folder)] == [True]


def test_a_search_passes_over_a_newer_version_with_a_warning(
    tmp_path: Path, caplog: Any
) -> None:
    shutil.copytree(KEPT, tmp_path / "checkpoint-3")
    newer = shutil.copytree(KEPT, tmp_path / "checkpoint-5")
    of_a_newer_release(newer, "ctrainer_state.json")
    with caplog.at_level(logging.WARNING, "ctrainer"):
        trainer_in(tmp_path).train(resume_from_checkpoint=True)
    assert "checkpoint-5/ctrainer_state.json: has version 2" in caplog.text
    assert version_of(tmp_path / "checkpoint-4", "ctrainer_state.json") == 1


def deprecations() -> list[str]:
    """What the package's calls of warnings.warn with DeprecationWarning say."""
    found = []
    for path in (ROOT / "ctrainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                said = [ast.unparse(argument) for argument in node.args]
                found += said[:1] if "DeprecationWarning" in said else []
    return found


def test_a_deprecated_name_goes_with_the_release_that_its_warning_names() -> None:
    said = deprecations()
    assert len(said) >= 2
    now = tuple(map(int, ctrainer.__version__.split(".")[:2]))
    for text in said:
        until = re.search(r"until (\d+)\.(\d+)\b", text)
        assert until, f"{text} names no release"
        assert now < (int(until[1]), int(until[2])), f"{text} is over"
