"""Every Python block of the README and of the pages runs, or has a mark."""

from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import page_blocks
import pytest
from places import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {page: page_blocks.blocks(page) for page in PAGES}
# The blocks that do not run here: a change of these numbers is a decision.
NOT_RUN = {"gpu": 2, "fairseq": 1, "slurm": 0}
# Each page is a fork of a process that has imported what all of them import.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers.trainer", "ctrainer"])


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if BLOCKS[page]],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_blocks_run(page: Path, tmp_path: Path) -> None:
    child = FORKS.Process(target=page_blocks.run, args=(page, tmp_path))
    child.start()
    child.join(240)
    child.kill()
    error = tmp_path / "error"
    assert not error.exists(), error.read_text()
    assert child.exitcode == 0


def test_marks_are_known_and_counted() -> None:
    marks = Counter(block.mark for found in BLOCKS.values() for block in found)
    assert set(marks) <= {"", "continues", *page_blocks.NEEDS}
    assert {need: marks[need] for need in page_blocks.NEEDS} == NOT_RUN


def test_no_block_is_left_out() -> None:
    for page, found in BLOCKS.items():
        assert page.read_text().count("```python") == len(found), page


def test_an_error_names_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n<!-- continues -->\n```python\na / 0\n```\n"
    )
    child = FORKS.Process(target=page_blocks.run, args=(page, tmp_path))
    child.start()
    child.join(240)
    assert 'page.md", line 6' in (tmp_path / "error").read_text()
