"""Writes the tables of benchmarks from what the benchmarks printed: into their page,
that of all optimizers into theirs, and anew the rows that the README has.

    python benchmarks/report.py out/benchmarks docs/benchmarks.md \
        docs/reference/optimizers.md README.md

Each bench_*.jsonl holds a JSON object a line: name, unit, ours, peer, theirs, ratio
(how many times better ours is; null where ours costs nothing, so that there is nothing
to divide by) and goal, the ratio to reach, or none. A line without a ratio is context
for a reader of the file and stays there.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
HEAD = (
    "| what | ctrainer | peer | | times better | goal |\n"
    "| --- | ---: | ---: | --- | ---: | ---: |\n"
)
OPTIMIZER_HEAD = (
    "| update of MiniLM's 22.7M parameters | threads | ctrainer | peer | | "
    "times better | of the memory's limit |\n"
    "| --- | ---: | ---: | ---: | --- | ---: | ---: |\n"
)


def comparisons(folder: Path) -> list[dict[str, Any]]:
    """The comparisons of a folder, file by file in the order of their names."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"{folder} holds no *.jsonl: run the benchmarks first")
    lines = [line for path in files for line in path.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if "ratio" in row]


def number(value: float) -> str:
    """Three figures, and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def missed(row: dict[str, Any]) -> bool:
    goal, ratio = row.get("goal"), row["ratio"]
    return goal is not None and ratio is not None and ratio < goal


def cells(row: dict[str, Any]) -> str:
    goal = f"{row['goal']:g}" if row.get("goal") is not None else ""
    met = f"{goal}, missed" if missed(row) else goal
    unit = row["unit"]
    ours, theirs = (f"{number(row[key])} {unit}" for key in ("ours", "theirs"))
    digits = "{:.4g}".format if missed(row) else number
    ratio = "∞" if row["ratio"] is None else digits(row["ratio"])
    return f"| {row['name']} | {ours} | {theirs} | {row['peer']} | {ratio} | {met} |"


def measured_on() -> str:
    where = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    return f"Measured on {where}, Python {platform.python_version()}.\n\n"


def table(rows: list[dict[str, Any]]) -> str:
    return measured_on() + HEAD + "\n".join(map(cells, rows)) + "\n"


def optimizer_cells(row: dict[str, Any]) -> str:
    ours, theirs = (f"{number(row[key])} {row['unit']}" for key in ("ours", "theirs"))
    share = "" if row["share"] is None else f"{row['share']:.0%}"
    slower = ", slower" if missed(row) else ""
    return (
        f"| {row['name']} | {row['threads']} | {ours} | {theirs} | {row['peer']} | "
        f"{row['ratio']:.3g}{slower} | {share} |"
    )


def optimizer_table(rows: list[dict[str, Any]]) -> str:
    return measured_on() + OPTIMIZER_HEAD + "\n".join(map(optimizer_cells, rows)) + "\n"


def rewrite(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Puts the text between two marks of the page."""
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} needs the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}{end}{after}")


def refresh(page: Path, rows: list[dict[str, Any]]) -> None:
    """Writes anew the rows that a page quotes: those of a job and a peer of ours."""
    lines = page.read_text().splitlines()
    for row in rows:
        new = cells(row).split(" | ")
        for i, line in enumerate(lines):
            old = line.split(" | ")
            if len(old) == 5 and (old[0], old[3]) == (new[0], new[3]):
                lines[i] = " | ".join(new[:5]) + " |"
    page.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("optimizers", type=Path, nargs="?", help="their page")
    parser.add_argument("readme", type=Path, nargs="?", help="quotes some rows")
    options = parser.parse_args()
    rows = comparisons(options.folder)
    rewrite(options.page, table([row for row in rows if "share" not in row]))
    every = [row for row in rows if "share" in row]
    if every and options.optimizers is not None:
        rewrite(options.optimizers, optimizer_table(every))
    if options.readme is not None:
        refresh(options.readme, rows)
    failures = [row for row in rows if missed(row)]
    print(f"{len(rows)} comparisons written, {len(failures)} goals missed")
    for row in failures:
        print(f"missed: {row['name']}: {row['ratio']:.2f} of {row['goal']:g}")


if __name__ == "__main__":
    main()
