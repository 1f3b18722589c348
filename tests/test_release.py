"""What a release is made of: the sdist's files, versions, machines, the wheels."""

import importlib.util
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy  # noqa: F401  before sys.platform is another
import pytest
import setuptools

import ctrainer

sys.path.append(str(Path(__file__).parents[1] / "release"))

import dist
import wheels

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLUGIN = tomllib.loads((ROOT / "release/cuda13/pyproject.toml").read_text())["project"]


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


def test_the_plugin_and_ctrainer_are_of_one_version() -> None:
    fields = runpy.run_path(str(ROOT / "release/cuda13/ctrainer_cuda13/__init__.py"))
    version = ctrainer.__version__
    assert PROJECT["version"] == PLUGIN["version"] == fields["__version__"] == version
    assert PROJECT["optional-dependencies"]["cuda13"] == [f"ctrainer-cuda13=={version}"]
    assert f"ctrainer=={version}" in PLUGIN["dependencies"]


def import_plugin(found: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """ctrainer._cuda where no plugin is built in place; found: the wheel's package."""
    monkeypatch.setitem(sys.modules, "ctrainer_cuda13", found)
    spec = importlib.util.spec_from_file_location(
        "cuda_of_a_wheel", ROOT / "ctrainer/_cuda.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return sys.modules[spec.name]


def wheel_of(version: str) -> ModuleType:
    package = ModuleType("ctrainer_cuda13")
    package.__version__, package._cuda = version, ModuleType("ctrainer_cuda13._cuda")
    return package


def test_the_plugin_is_that_of_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    package = wheel_of(ctrainer.__version__)
    assert import_plugin(package, monkeypatch) is package._cuda


def test_a_plugin_of_another_version_is_an_error_with_both_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ImportError) as caught:
        import_plugin(wheel_of("0.0.7"), monkeypatch)
    ours = ctrainer.__version__
    assert str(caught.value) == (
        f"ctrainer-cuda13 is of version 0.0.7 and ctrainer of {ours}: "
        f"pip install 'ctrainer-cuda13=={ours}'"
    )


def test_without_a_plugin_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ctrainer\[cuda13\]'"):
        import_plugin(None, monkeypatch)


def test_from_ctrainer_import_says_it_too() -> None:
    if importlib.util.find_spec("ctrainer._cuda").origin.endswith(".so"):
        pytest.skip("a plugin is built in place")
    with pytest.raises(ImportError, match=r"ctrainer\[cuda13\]"):
        from ctrainer import _cuda  # noqa: F401


def wheel_with(extension: str, *flags: str, folder: Path) -> Path:
    """A wheel whose extension is compiled from a line of C."""
    (folder / "x.c").write_text(extension)
    command = ["cc", "-shared", "-fPIC", *flags, "-o", "x.so", "x.c"]
    subprocess.run(command, cwd=folder, check=True)
    with zipfile.ZipFile(folder / "x.whl", "w") as archive:
        archive.write(folder / "x.so", "x.so")
    return folder / "x.whl"


def test_a_wheel_may_take_symbols_of_python_and_of_the_old_glibc_alone(
    tmp_path: Path,
) -> None:
    of_python = "int PyErr_Occurred(void); int f(void) { return PyErr_Occurred(); }"
    wheels.check_symbols(wheel_with(of_python, folder=tmp_path))
    newer = "int of_a_newer_glibc(void); int f(void) { return of_a_newer_glibc(); }"
    with pytest.raises(SystemExit, match=r"glibc 2\.28 lacks of_a_newer_glibc"):
        wheels.check_symbols(wheel_with(newer, folder=tmp_path))
    weak = newer.replace(";", " __attribute__((weak));", 1)
    wheels.check_symbols(wheel_with(weak, folder=tmp_path))


def test_a_wheel_is_stripped(tmp_path: Path) -> None:
    line = "int f(void) { return 1; }"
    dist.check_wheel(wheel_with(line, "-s", folder=tmp_path))
    with pytest.raises(SystemExit, match=r"not stripped: it has \.symtab"):
        dist.check_wheel(wheel_with(line, folder=tmp_path))
