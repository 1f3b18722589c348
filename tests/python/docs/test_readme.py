"""The README does what it says: its Python runs, its commands and figures exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_python_blocks_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 16  # 64 examples, 8 a batch, 2 epochs
    assert (tmp_path / "out/tagger/checkpoint-16/model.safetensors").exists()


def test_its_length() -> None:
    assert README.count("\n") <= 120


def test_its_figures_are_rows_of_the_page_of_benchmarks() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    table = README.partition("<!-- figures:begin -->")[2].partition("<!--")[0]
    rows = table.strip().splitlines()[2:]
    assert len(rows) == 5
    assert not [row for row in rows if row not in page]


def test_the_versions_are_those_that_the_tests_ask_for() -> None:
    project = (ROOT / "pyproject.toml").read_text() + (ROOT / "Makefile").read_text()
    for name in ("torch", "transformers", "accelerate"):
        (pinned,) = set(re.findall(rf"(?<=[\"' ]){name}==([\d.]+)", project))
        assert f"| {name} | {pinned}" in README


def commands(pattern: str) -> set[str]:
    """What follows a command in the README and in the pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {name for page in pages for name in re.findall(pattern, page.read_text())}


def test_what_is_made_are_targets_of_the_makefiles() -> None:
    makefiles = [ROOT / "Makefile", ROOT / "tests/cuda/cuda.mk"]
    text = "".join(path.read_text() for path in makefiles)
    targets = commands(r"(?m)(?:^|`)make ([a-z-]+)(?=[`\s])")
    assert {"demo", "test", "bench", "docs"} <= targets
    left = [
        t for t in targets if not re.search(rf"^[\w -]*\b{t}\b[^:=\n]*:", text, re.M)
    ]
    assert not left


def test_programs_are_those_of_the_package() -> None:
    program = [sys.executable, "-m", "ctrainer", "--help"]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    named = commands(r"(?m)(?:^\$ |`)ctrainer ([a-z-]+)")
    named |= commands(r"(?m)^ctrainer ([a-z-]+) --")
    assert {"consolidate", "memory", "replay", "fairseq-train"} <= named
    # One way to write a command; the page on commands alone says that there are two.
    assert commands(r"python -m ctrainer (\S+)") == {"COMMAND`"}
    assert not [name for name in named if name not in done.stdout]


def test_the_table_of_benchmarks_is_made_from_their_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\nz\n")
    (tmp_path / "bench_x.jsonl").write_text(
        '{"benchmark": "x", "note": "no comparison"}\n'
        '{"benchmark": "x", "name": "a job", "unit": "ms", "ours": 2.0,'
        ' "peer": "them", "theirs": 5.0, "ratio": 2.5, "goal": 3.0}\n'
        '{"benchmark": "x", "name": "free", "unit": "us", "ours": -0.5,'
        ' "peer": "them", "theirs": 70.0, "ratio": null, "goal": 10.0}\n'
        '{"benchmark": "o", "name": "Sum", "threads": 2, "unit": "ms", "ours": 2.0,'
        ' "peer": "them", "theirs": 5.0, "ratio": 2.5, "goal": 1.0, "share": 0.96}\n'
        '{"benchmark": "o", "name": "Max", "threads": 1, "unit": "ms", "ours": 4.0,'
        ' "peer": "them", "theirs": 3.0, "ratio": 0.75, "goal": 1.0, "share": null}\n'
    )
    optimizers = tmp_path / "optimizers.md"
    optimizers.write_text("<!-- benchmarks:begin -->\n<!-- benchmarks:end -->\n")
    program = str(ROOT / "benchmarks/report.py")
    readme = tmp_path / "README.md"
    readme.write_text("| a job | 9 ms | 5 ms | them | 0.6 |\n| b | c |\n")
    report = [sys.executable, program, tmp_path, page, optimizers, readme]
    subprocess.run(report, check=True, capture_output=True)
    text = page.read_text()
    assert "| a job | 2 ms | 5 ms | them | 2.5 | 3, missed |" in text
    assert "| free | -0.5 us | 70 us | them | ∞ | 10 |" in text
    assert readme.read_text() == "| a job | 2 ms | 5 ms | them | 2.5 |\n| b | c |\n"
    assert "old" not in text
    assert "Sum" not in text
    lines = optimizers.read_text()
    assert "| Sum | 2 | 2 ms | 5 ms | them | 2.5 | 96% |" in lines
    assert "| Max | 1 | 4 ms | 3 ms | them | 0.75, slower |  |" in lines
    assert text.startswith("a\n")
    assert text.endswith("z\n")
