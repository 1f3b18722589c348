"""Draws faults, puts each into a copy of the tree, and says which tests see it.

    python tests/mutants/run.py [--count 100] [--seed 2] [--area NAME ...]
                                [--only NUMBER ...] [--list] [--trusted] [--device]

Exits 1 if fewer than 95 of 100 are seen by the tests of their area, or fewer than 90 by
the nearest; 2 where tests fail without a fault. Each result, with the line that says
what failed, goes to build/mutants/results.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.areas import AREAS, nearest  # noqa: E402
from mutants.faults import Fault, faults  # noqa: E402
from mutants.known import EQUIVALENT, FIXED, Fixed  # noqa: E402
from mutants.on_device import DEVICE  # noqa: E402

COPIED = (
    *("Makefile", "setup.py", "pyproject.toml", "README.md", "CHANGELOG.md"),
    *("csrc", "cuda", "ctrainer", "tests", "docs", "examples", "benchmarks", "build"),
)
LEFT_OUT = shutil.ignore_patterns("mutants", "asan", "tsan", "*.log", "__pycache__")
LEAST_SECONDS = 30.0  # before a test that was quick without the fault counts as hung
ONE_TEST = "timeout=120"  # seconds, of pytest's own: a file has many tests
CAUGHT, BY_NEAREST = 95, 90  # of 100

Drawn = tuple[Fault, str, list[str]]  # the fault, its area, its nearest tests


def excluded(fault: Fault) -> bool:
    told = (fault.path, fault.before.strip(), fault.after.strip())
    return any(told == equivalent[:3] for equivalent in EQUIVALENT)


def drawn(
    seed: int, areas: list[str], always: tuple[Fixed, ...] = FIXED
) -> Iterator[Drawn]:
    """The fixed faults, then others: by area, operator and place, each alike likely.

    A fault's turn comes of the seed and its own text, so that one more in a file leaves
    the order of the others as it was. What is excluded keeps its number.
    """
    known = nearest()
    for fixed in always:
        area = known[fixed.path][0]
        if area in areas or always is not FIXED:
            text = (ROOT / fixed.path).read_text()
            yield fixed.fault(text), area, [fixed.nearest]
    turns: list[tuple[float, Drawn]] = []
    for area in areas:
        kinds: dict[str, list[Drawn]] = {}
        for path, tests in AREAS[area].tests().items():
            for fault in faults(ROOT, path):
                drawing = (fault, area, tests)
                kinds.setdefault(fault.operator, []).append(drawing)
        for kind in kinds.values():
            alike: Counter[tuple[str, str, str]] = Counter()
            for drawing in kind:
                fault = drawing[0]
                text = (fault.path, fault.before, fault.after)
                alike[text] += 1
                own = random.Random(repr((seed, *text, alike[text])))
                turn = own.expovariate(1 / (len(kinds) * len(kind)))
                turns.append((turn, drawing))
    yield from (drawing for _, drawing in sorted(turns, key=lambda turn: turn[0]))


def said(status: int | None, text: str) -> str:
    """The line by which a test says what failed."""
    if status is None:
        return "hung"
    lines = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("CTRAINER_EMUL_SEED=")]
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return f"{status}: {(named or lines[-1:] or ['nothing'])[0][:300]}"


class Tree:
    """A copy of the working tree, with what is built in it."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        self.folder = ROOT / "build/mutants/tree"
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in COPIED:
            source, target = ROOT / name, self.folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=LEFT_OUT, symlinks=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        self.environment = {
            **os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "CTRAINER_CUDA": "0",
        }  # fmt: skip
        self.seconds: dict[str, float] = {}  # that each test takes without a fault
        self.said = ""  # by the test that ran last

    def run(self, seconds: float, *command: str) -> tuple[int | None, str]:
        """The exit status, None after that time, and what it wrote."""
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            text = ""
        finally:
            hung = process.poll() is None
            try:
                os.killpg(process.pid, signal.SIGKILL)  # ranks that it left
            except ProcessLookupError:
                pass
            process.wait()
        return None if hung else process.returncode, text

    def build(self, test: str) -> str:
        """What the compiler says where it fails."""
        name = Path(test).stem
        if test.startswith("core/"):
            warned = "STRICT=-std=c11 -w"
            status, text = self.run(600, "make", "-s", warned, f"build/{name}")
        elif test.endswith(".cpp"):
            warned = "EMUL_FLAGS=-O1 -w -ffp-contract=off -fPIC -pthread"
            core = "STRICT=-std=c11 -w"
            targets = (f"build/emul/{name}", "cuda-emul-libraries")
            status, text = self.run(900, "make", "-s", core, warned, *targets)
        else:
            command = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
            status, text = self.run(900, *command)
        return "" if status == 0 else text or "hung"

    def passes(self, test: str, seconds: float) -> bool:
        name = Path(test).stem
        if test.startswith("core/"):
            status, text = self.run(seconds, f"build/{name}")
        elif test.endswith(".cpp"):
            status, text = self.run(seconds, f"build/emul/{name}")
        else:
            status, text = self.run(
                seconds, sys.executable, "-m", "pytest", "-x", "-q", "-p",
                "no:cacheprovider", "-o", ONE_TEST, f"tests/{test}",
            )  # fmt: skip
            assert status != 5, f"there is no test in {test}: {text}"
        self.said = said(status, text)
        return status == 0

    def measure(self, test: str) -> None:
        """A test that fails by itself would seem to see every fault."""
        if self.trusted:
            self.seconds[test] = 30.0 if test.endswith(".py") else 3.0
        elif test not in self.seconds:
            failed = self.build(test)
            began = time.monotonic()
            if failed or not self.passes(test, 600):
                print(f"{test} fails without a fault\n{failed}")
                sys.exit(2)
            self.seconds[test] = time.monotonic() - began

    def sees(self, test: str) -> bool:
        return not self.passes(test, LEAST_SECONDS + 10 * self.seconds[test])


def tried(tree: Tree, fault: Fault, tests: list[str]) -> str:
    """The test that fails; "" where all pass, "does not compile" where that is so."""
    path = tree.folder / fault.path
    text = path.read_text()  # of the copy: the working tree may change meanwhile
    for test in tests:
        tree.measure(test)
    path.write_text(fault.applied(text))
    try:
        if fault.path.endswith(".py"):
            compile(path.read_text(), fault.path, "exec")
        for test in tests:
            if tree.build(test):
                return "does not compile"
            if tree.sees(test):
                return test
        return ""
    except SyntaxError:
        return "does not compile"
    finally:
        path.write_text(text)


def judged(tree: Tree, drawing: Drawn) -> dict[str, str]:
    """The fault and how it was caught: by nearest, by area, or not."""
    fault, area, tests = drawing
    by = tried(tree, fault, tests)
    how = "nearest"
    if not by:
        others = [t for t in AREAS[area].others.split() if t not in tests]
        by, how = tried(tree, fault, others), "area"
    if by == "does not compile":
        how = by
    if not by:
        how = "-"
    line = tree.said if how in ("nearest", "area") else ""
    return {"area": area, "fault": str(fault), "by": by, "how": how, "said": line}


def confirm(tree: Tree, results: list[dict[str, str]]) -> None:
    """Take back what was seen by tests that fail without a fault, too."""
    for test in sorted({r["by"] for r in results if r["by"]}):
        if tree.build(test) or not tree.passes(test, 600):
            print(f"{test} fails without a fault: {tree.said}", flush=True)
            for result in results:
                if result["by"] == test:
                    result.update(by="", how="-")


def told(results: list[dict[str, str]]) -> int:
    """Prints the sums; the exit status."""
    n = len(results)
    nearest = sum(r["how"] == "nearest" for r in results)
    caught = sum(bool(r["by"]) for r in results)
    print(f"{caught} of {n} faults caught, {nearest} by the nearest tests")
    for area in AREAS:
        own = [r for r in results if r["area"] == area]
        if own:
            near = sum(r["how"] == "nearest" for r in own)
            print(f"  {area}: {sum(bool(r['by']) for r in own)} of {len(own)}, {near}")
    survived = [r["fault"] for r in results if not r["by"]]
    print("\n".join(["survived:", *survived] if survived else []))
    return int(caught * 100 < CAUGHT * n or nearest * 100 < BY_NEAREST * n)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--area", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--only", nargs="+", type=int, help="numbers of the draw")
    parser.add_argument("--list", action="store_true", help="draw, and try nothing")
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="the tests have just passed: run those that saw a fault again at the end "
        "rather than all at first",
    )
    parser.add_argument(
        "--device",
        action="store_true",
        help="faults of on_device.py, then of area cuda alone; 60 unless told",
    )
    given = parser.parse_args()
    if given.device:
        given.area = ["cuda"]
    count = given.count or (60 if given.device else 100)
    tree = None if given.list else Tree(given.trusted)
    results: list[dict[str, str]] = []
    folder = ROOT / "build/mutants"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "results.jsonl", "a") as log:
        always = DEVICE if given.device else FIXED
        for number, drawing in enumerate(drawn(given.seed, given.area, always)):
            if len(results) == (len(given.only) if given.only else count):
                break
            if (given.only and number not in given.only) or excluded(drawing[0]):
                continue
            if tree is None:
                print(number, drawing[0], flush=True)
                results.append({})
                continue
            began = time.monotonic()
            result = judged(tree, drawing)
            seconds = time.monotonic() - began
            by = result["by"] or "nobody"
            print(f"{number} {result['how']}: {by}, {seconds:.0f} s")
            print(f"{result['fault']}\n  {result['said']}", flush=True)
            log.write(json.dumps({"seed": given.seed, "number": number, **result}))
            log.write("\n")
            log.flush()
            if result["how"] != "does not compile":
                results.append(result)
    if tree is None:
        return 0
    if given.trusted:
        confirm(tree, results)
    return told(results)


if __name__ == "__main__":
    sys.exit(main())
