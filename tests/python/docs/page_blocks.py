"""The Python blocks of a Markdown page, and how they run.

A block runs alone, as a user would paste it. A comment in the line above it says
otherwise:

    <!-- continues -->    it runs after the block before it
    <!-- gpu -->          it needs a GPU or the CUDA plugin, and is only compiled
    <!-- fairseq -->      the same: it needs an installed fairseq
    <!-- slurm -->        the same: it needs a job of SLURM
"""

import os
import re
import traceback
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"(?:^<!-- ([a-z]+) -->\n)?^```python\n(.*?)^```$", re.M | re.S)
NEEDS = ("gpu", "fairseq", "slurm")


class Block(NamedTuple):
    """A block, the number of its first line, and its mark or ""."""

    line: int
    mark: str
    code: str


def blocks(page: Path) -> list[Block]:
    """The page's blocks from top to bottom."""
    text = page.read_text()
    return [
        Block(text.count("\n", 0, found.start(2)) + 1, found[1] or "", found[2])
        for found in _BLOCK.finditer(text)
    ]


def run(page: Path, folder: Path) -> None:
    """Run a page's blocks in a folder of their own; a process ends with it.

    An exception is written to the file `error` of the folder, with the page's lines.
    """
    os.chdir(folder)
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.mark != "continues":
            names = {"__name__": "page"}
        try:
            program = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            if block.mark not in NEEDS:
                exec(program, names)
        except BaseException:
            Path("error").write_text(traceback.format_exc())
            os._exit(1)
