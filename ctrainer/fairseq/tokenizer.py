"""Words of a line, by the name of fairseq's tokenizer.py."""

from __future__ import annotations


def tokenize_line(line: str) -> list[str]:
    """The words between runs of white space."""
    return line.split()
