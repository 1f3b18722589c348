"""The table of features, held against the files, and its lines of code.

python -m tests.support.features    writes the lines into the table
"""

import io
import re
import subprocess
import tokenize
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs/development/features.md"
_COMMENT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.S
)
_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
          tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}  # fmt: skip


def rows() -> list[list[str]]:
    """Feature, files, lines, who uses it, test: the cells of each row."""
    lines = [x for x in TABLE.read_text().splitlines() if x.startswith("| ")]
    return [[cell.strip() for cell in x.strip("|").split("|")] for x in lines[2:]]


def product() -> list[str]:
    """The product's files, from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "csrc", "cuda", "ctrainer"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [x for x in listed.stdout.split() if (ROOT / x).exists()]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def files() -> dict[str, list[str]]:
    """The files of each pattern: each file is of the longest that it has."""
    globs = sorted((g for row in rows() for g in quoted(row[1])), key=len)
    found: dict[str, list[str]] = {glob: [] for glob in globs}
    for file in product():
        matching = [glob for glob in globs if fnmatch(file, glob)]
        assert matching, f"{file} is of no row of {TABLE}"
        found[matching[-1]].append(file)
    return found


def code_lines(file: str) -> int:
    """Lines with code, without blank ones, comments and docstrings."""
    text = (ROOT / file).read_text()
    if not file.endswith((".py", ".pyi")):
        bare = _COMMENT.sub(lambda m: m[1] or " ", text)
        return sum(bool(line.strip()) for line in bare.splitlines())
    found: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = begins and token.type == tokenize.STRING
        if token.type not in _BLANK and not is_docstring:
            found.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = token.type in _BLANK
    return len(found)


def main() -> None:
    text, total, of = TABLE.read_text(), 0, files()
    for row in rows():
        lines = sum(code_lines(f) for glob in quoted(row[1]) for f in of[glob])
        total += lines
        cells = [*row[:2], f"{lines:,}", *row[3:]]
        text = text.replace(f"| {' | '.join(row)} |", f"| {' | '.join(cells)} |")
    TABLE.write_text(text)
    print(f"{total:,} lines")


if __name__ == "__main__":
    main()
