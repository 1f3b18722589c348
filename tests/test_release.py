"""What a release is made of: the sdist's files, versions, machines, the wheels."""

import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  before sys.platform is another
import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_sdist_has_every_file_of_the_repository(tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    listed = (tmp_path / "ctrainer.egg-info/SOURCES.txt").read_text().splitlines()
    in_tree = {x for x in listed if not x.startswith(str(tmp_path))}
    missing = {x for x in tracked if (ROOT / x).exists()} - in_tree
    assert not missing, "MANIFEST.in leaves these out"
    built = [x for x in in_tree if x.endswith((".so", ".o", ".pyc")) or "build/" in x]
    assert not built


def test_the_wheel_has_every_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    setup = tomllib.loads(text)["tool"]["setuptools"]
    found = {".".join(p.parent.relative_to(ROOT).parts)
             for p in (ROOT / "ctrainer").rglob("*.py")}  # fmt: skip
    assert set(setup["packages"]) == found | {"ctrainer.examples"}


NO_GIL = {"Py_GIL_DISABLED": 1}


@pytest.mark.parametrize(
    ("module", "name", "value", "sentence"),
    [
        (sys, "platform", "darwin", "this is darwin, .* Linux alone"),
        (sys, "platform", "win32", "this is win32, .* Linux alone"),
        (sys, "maxsize", 2**31 - 1, "32 bits"),
        (sysconfig, "get_config_var", NO_GIL.get, "no GIL"),
    ],
)
def test_a_machine_that_it_is_not_for_is_turned_down(
    module: Any, name: str, value: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **_: pytest.fail("it is built"))
    monkeypatch.setattr(module, name, value)
    with pytest.raises(SystemExit, match=f"cannot be built: .*{sentence}"):
        runpy.run_path("setup.py")


def test_the_page_of_extras_has_those_of_the_project() -> None:
    page = (ROOT / "docs/start/install.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ", page, re.M)
    assert sorted(rows) == sorted(PROJECT["optional-dependencies"])
