"""Writes the tables of the reference pages from docstrings and the command line.

python docs/make_tables.py            rewrites the tables
python docs/make_tables.py --check    exits 1 when one is not current

A table stands between `<!-- table: KIND NAME -->` and `<!-- table: end -->`. KIND is
`arguments` of a class or a method, `methods` of a class, or `commands` of a module.
"""

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

PAGES = sorted(Path(__file__).parent.rglob("*.md"))
TABLE = re.compile(r"(<!-- table: (\w+) ([\w.]+) -->\n).*?(<!-- table: end -->)", re.S)
ENTRY = re.compile(r"([\w*, ]+) \((.*?)(?:, default (.*?))?\): (.*)")


def found(name: str) -> Any:
    """A class, a function, or a method of a class, by its whole name."""
    return pkgutil.resolve_name(name)


def made(head: str, rows: list[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *lines, ""])


def arguments(name: str) -> str:
    """A row for each entry of its Args: name, default, type and meaning."""
    text = inspect.getdoc(found(name)) or ""
    entries = re.findall(r"^    \S.*(?:\n {8}.*)*", _section(text, "Args"), re.M)
    rows = []
    for entry in entries:
        parts = ENTRY.fullmatch(" ".join(entry.split()))
        assert parts is not None, f"{name}: {entry}"
        names, kind, default, meaning = parts.groups()
        words = ", ".join(f"`{word}`" for word in names.split(", "))
        rows.append((words, f"`{default}`" if default else "", f"`{kind}`", meaning))
    return made("| argument | default | type | meaning |", rows)


def _section(text: str, head: str) -> str:
    return text.partition(f"\n{head}:\n")[2].partition("\n\n")[0]


def methods(name: str) -> str:
    """A row for each public method of the class itself: its call, and what it does."""
    rows = []
    for member, value in vars(found(name)).items():
        plain = getattr(value, "__func__", value)
        if member[0] != "_" and inspect.isroutine(plain):
            does = (inspect.getdoc(plain) or "").partition("\n\n")[0]
            rows.append((f"`{member}{_call(plain)}`", " ".join(does.split())))
    return made("| method | what it does |", sorted(rows))


def _call(method: Any) -> str:
    """The arguments with their defaults, without self and annotations."""
    taken = list(inspect.signature(method).parameters.values())
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in taken]
    return str(inspect.Signature([p for p in bare if p.name not in ("self", "cls")]))


def commands(name: str) -> str:
    """A row for each command of the module: its name, and what it does."""
    known = importlib.import_module(name).COMMANDS
    rows = [(f"`ctrainer {command}`", does) for command, (_, does) in known.items()]
    return made("| command | what it does |", rows)


KINDS = {"arguments": arguments, "methods": methods, "commands": commands}


def current(text: str) -> str:
    """The page with its tables made anew."""
    return TABLE.sub(lambda m: f"{m[1]}{KINDS[m[2]](m[3])}{m[4]}", text)


def main() -> int:
    changed = [page for page in PAGES if page.read_text() != current(page.read_text())]
    if "--check" in sys.argv[1:]:
        print(*changed, sep="\n")
        return int(bool(changed))
    for page in changed:
        page.write_text(current(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
