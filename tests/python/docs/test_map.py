"""docs/development/map.md names files and functions that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/development/map.md").read_text()
NAMED = re.findall(r"`((?:csrc|cuda|ctrainer|tests)/[^`]*)`", PAGE)
CALLS = re.findall(r"`(\w+)`\s+\(`([^`]+)`\)", PAGE)
ROWS = [
    (symbol, row[0])
    for row in re.findall(r"^\| [^|]+ \| `([^`]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    for symbol in re.findall(r"`(\w+)`", row[1])
    if not row[0].endswith("/")
]


def test_the_page_names_something() -> None:
    assert len(NAMED) > 60
    assert len(CALLS) >= 28
    assert len(ROWS) >= 19


@pytest.mark.parametrize("path", sorted(set(NAMED)))
def test_what_is_named_is_there(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("symbol", "path"), sorted({*CALLS, *ROWS}))
def test_symbols_are_defined_in_the_files_named(symbol: str, path: str) -> None:
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        found = re.search(rf"^ *(def|class) {symbol}\b|^{symbol} =", text, re.MULTILINE)
    elif path.endswith(".h"):
        found = re.search(rf"\({symbol},|\b{symbol}\(", text)
    else:
        found = re.search(rf"^{symbol}\([^;]*?\)\n\{{", text, re.MULTILINE)
    assert found, f"{path} does not define {symbol}"


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"],
    ids=lambda p: p.name,
)
def test_paths_in_pages_exist(page: Path) -> None:
    """Paths from the root in backticks; NAME stands for any file."""
    folders = "csrc|cuda|ctrainer|tests|docs|benchmarks|examples"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text())
    assert not [p for p in paths if "NAME" not in p and not (ROOT / p).exists()]
