"""A terminal's screen, out of what was written to it."""

from __future__ import annotations

import re


def screen(text: str) -> list[str]:
    """Lines as a terminal shows them: carriage return, newline, erase to the end."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|.|\n|\r", text):
        if token in ("\r", "\x1b[G"):
            column = 0
        elif token == "\n":
            row += 1
            lines.append("")
        elif token == "\x1b[K":
            lines[row] = lines[row][:column]
        elif not token.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
