"""Which .c files an update of HF's Trainer enters, counted in a build with coverage.

python -m tests.support.step_files BUILD    BUILD has ext/ (objects) and lib/ctrainer

Two runs differ by 10 updates: a function that runs more often in the longer one
belongs to the update; setting up, logging and saving cost both runs the same.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

MOST = 21  # .c files; a ratchet: lower it when the count is lower
PROGRAM = Path(__file__).resolve().parents[1] / "programs/trainer/steps.py"


def calls(build: Path, updates: int) -> Counter[tuple[str, str]]:
    """How often a run of so many updates calls each function of each .c file."""
    for counts in (build / "ext").rglob("*.gcda"):
        counts.unlink()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(PROGRAM), str(updates), folder],
            env={**os.environ, "PYTHONPATH": str(build / "lib")}, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    written = [str(p.resolve()) for p in (build / "ext").rglob("*.gcda")]
    reports = subprocess.run(
        [os.environ.get("GCOV", "gcov"), "--json-format", "--stdout", *written],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found: Counter[tuple[str, str]] = Counter()
    for report in reports.splitlines():
        for file in json.loads(report)["files"]:
            for function in file["functions"]:
                key = (file["file"], function["name"])
                found[key] += function["execution_count"]
    return found


def main(build: Path) -> None:
    more = calls(build, 20) - calls(build, 10)
    assert more, f"no function of {build} ran more often in more updates"
    entered = Counter(file for file, _ in more if file.endswith(".c"))
    for file, functions in sorted(entered.items()):
        print(f"{functions:4} functions of {file}")
    functions = sum(entered.values())
    print(f"an update enters {functions} functions in {len(entered)} .c files")
    assert len(entered) <= MOST, f"at most {MOST}: merge files that are one concept"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
