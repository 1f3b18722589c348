"""The tables of the reference pages are those of the docstrings and the commands."""

import inspect
import re
import subprocess
import sys

import pytest
from places import ROOT

from ctrainer.arguments import fsdp
from ctrainer.comm import environment
from ctrainer.compat import fairscale

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


WRITTEN = {
    "fsdp": [*fsdp.SUPPORTED, *fsdp.NO_EFFECT],
    "fairscale": fairscale.__all__,
    "communication": [launcher.rank for launcher in environment._LAUNCHERS],
}


@pytest.mark.parametrize("page", WRITTEN)
def test_tables_written_by_hand_have_every_name(page: str) -> None:
    text = (ROOT / "docs/reference" / f"{page}.md").read_text()
    names = WRITTEN[page]
    assert len(names) > 3
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
