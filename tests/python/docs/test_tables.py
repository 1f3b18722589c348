"""The tables of the reference pages are those of the docstrings and the commands."""

import inspect
import subprocess
import sys

from places import ROOT

PROGRAM = ROOT / "docs/make_tables.py"


def test_the_tables_are_current() -> None:
    check = [sys.executable, str(PROGRAM), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, f"run {PROGRAM}: {done.stdout}{done.stderr}"


def test_every_argument_has_its_row() -> None:
    from ctrainer.fsdp import FullyShardedDataParallel

    page = (ROOT / "docs/reference/fsdp.md").read_text()
    table = page.partition("<!-- table: arguments")[2].partition("<!-- table: end")[0]
    names = inspect.signature(FullyShardedDataParallel).parameters
    assert len(names) > 40
    assert {name for name in names if f"`{name}`" not in table} <= {"kwargs"}
