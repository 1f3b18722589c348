"""What `make mutants` draws: faults in files that exist."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from draws import EXHAUSTIVE
from mutants import areas, known, on_device
from mutants.faults import Fault, c_faults, faults, python_faults
from mutants.run import confirm, drawn, excluded, told

ROOT = Path(__file__).resolve().parent.parent

C = """\
/* if (a) { in a comment */
int
f(int a)
{
    wait_for(a);
    move(a - b);
    if (a < 3) {
        return fail("a < 3");
    }
    for (; a < 3;) {
        free(a);
    }
    return c->rank + 1;
}
"""
MADE_OF_C = [
    (5, "drop a synchronisation", "    ;"),
    (6, "delete a call", "    ;"),
    (6, "swap operands", "    move(b - a);"),
    (7, "negate a condition", "    if (!(a < 3)) {"),
    (7, "off by one", "    if (a <= 3) {"),
    (7, "skip a check", "    if (0 && (a < 3)) {"),
    (7, "swap operands", "    if (3 < a) {"),
    (13, "off by one", "    return c->rank;"),
    (13, "wrong stream or rank", "    return (c->rank + 1) + 1;"),
]
PYTHON = """\
def f(a):
    \"\"\"if a < 3: in words.\"\"\"
    if a < 3:
        raise ValueError("a - b")
    a.barrier()
    a.move(a - b)
    return c.rank + 1
"""
MADE_OF_PYTHON = [
    (3, "negate a condition", "    if not (a < 3):"),
    (3, "off by one", "    if a <= 3:"),
    (3, "skip a check", "    if False and (a < 3):"),
    (5, "drop a synchronisation", "    ..."),
    (6, "delete a call", "    ..."),
    (6, "swap operands", "    a.move(((b) - (a)))"),
    (7, "off by one", "    return (c.rank)"),
    (7, "wrong stream or rank", "    return (c.rank + 1) + 1"),
]


def test_each_operator_makes_its_faults() -> None:
    assert sorted(c_faults(C)) == MADE_OF_C
    assert sorted(python_faults(PYTHON)) == MADE_OF_PYTHON


@pytest.mark.parametrize(
    ("statement", "bounds"),
    [
        ("n = a < b ? a : b;", 0),
        ("n = size(f, at + 1 > b->n ? at + 1 : b->n);", 0),
        ("return a > b ? b : a;", 0),
        ("n = a < b ? b : c;", 1),
        ("n = a - b < c ? b : c;", 1),
        ("n = a < b ? a : b + 1;", 1),
    ],
)
def test_of_the_smaller_or_larger_of_two_the_bound_is_no_fault(
    statement: str, bounds: int
) -> None:
    made = c_faults(f"int\nf(void)\n{{\n    {statement}\n}}\n")
    assert sum(operator == "off by one" for _, operator, _ in made) == bounds + (
        statement.count("+ 1")
    )


@pytest.mark.parametrize("name", areas.AREAS)
def test_every_named_file_has_faults_and_tests(name: str) -> None:
    area = areas.AREAS[name]
    for path, tests in area.tests().items():
        for test in tests + area.others.split():
            assert (ROOT / "tests" / test).exists(), f"{path}: there is no {test}"
        found = faults(ROOT, path)
        assert found, f"{path} has no faults"
        text = (ROOT / path).read_text()
        if path.endswith(".py"):
            for fault in found[:: 1 if EXHAUSTIVE else 25]:
                ast.parse(fault.applied(text))


def test_every_source_with_faults_is_drawn_once_or_named_with_a_reason() -> None:
    drawn_in = [file for area in areas.AREAS.values() for file in area.tests()]
    left_out = [file for files in areas.NOT_DRAWN for file in files.split()]
    named = Counter(drawn_in + left_out)
    assert [file for file, times in named.items() if times > 1] == []
    kinds = (".c", ".h", ".cu", ".cuh", ".py")
    sources = {
        str(path.relative_to(ROOT))
        for folder in ("csrc", "cuda", "ctrainer")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds
    }
    missing = [s for s in sources - set(named) if faults(ROOT, s)]
    assert not missing, f"give these a line in tests/mutants/areas.py: {missing}"


@pytest.mark.parametrize(
    "fixed", known.FIXED + on_device.DEVICE, ids=lambda fixed: fixed.why
)
def test_the_fixed_faults_apply(fixed: known.Fixed) -> None:
    text = (ROOT / fixed.path).read_text()
    assert fixed.fault(text).applied(text) != text
    assert (ROOT / "tests" / fixed.nearest).exists()


def test_what_is_excluded_are_faults_with_a_reason() -> None:
    for path, before, after, reason in known.EQUIVALENT:
        assert len(reason) > 20
        alike = [
            fault
            for fault in faults(ROOT, path)
            if (fault.before.strip(), fault.after.strip()) == (before, after)
        ]
        assert alike, f"{path} has no fault that makes {before!r} {after!r}"
        assert all(map(excluded, alike))
    assert not excluded(Fault("csrc/core/base/io.c", 1, "", "before", "after"))


def test_a_seed_draws_the_same_faults_with_the_fixed_ones_first() -> None:
    every = list(areas.AREAS)
    first, second = ([f for f, _, _ in drawn(3, every)][:200] for _ in range(2))
    assert first == second
    assert len(set(first)) == 200
    assert [f.path for f in first[:5]] == [fixed.path for fixed in known.FIXED]
    assert first != [f for f, _, _ in drawn(4, every)][:200]
    assert {area for _, area, _ in drawn(0, ["bmuf"])} == {"bmuf"}


def test_the_others_keep_their_order_where_a_file_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = [fault for fault, _, _ in drawn(3, ["bmuf"])]
    lines = Counter((fault.path, fault.before) for fault in every)
    frequent = Counter(fault.operator for fault in every).most_common(1)[0][0]
    gone = next(
        f for f in every[5:] if f.operator == frequent and lines[f.path, f.before] == 1
    )

    def without(root: Path, path: str) -> list[Fault]:
        return [fault for fault in faults(root, path) if fault != gone]

    monkeypatch.setattr("mutants.run.faults", without)
    left = [fault for fault, _, _ in drawn(3, ["bmuf"])]
    for alike in (True, False):
        before, after = (
            [f for f in some if (f.operator == gone.operator) is alike and f != gone]
            for some in (every, left)
        )
        assert before == after
        assert len(before) > 10


def results(nearest: int, area: int, survived: int) -> list[dict[str, str]]:
    near = {"area": "bmuf", "fault": "", "how": "nearest", "by": "a test", "said": ""}
    far = {**near, "how": "area"}
    alive = {**near, "how": "-", "by": ""}
    return [near] * nearest + [far] * area + [alive] * survived


def test_what_fails_without_a_fault_has_seen_none() -> None:
    class Tree:
        said = "1: FAILED"

        def build(self, test: str) -> str:
            return "no such header" if test == "unbuilt" else ""

        def passes(self, test: str, seconds: float) -> bool:
            return test != "failing"

    by = ("sound", "failing", "unbuilt", "", "failing")
    found = [{"by": test, "how": "nearest" if test else "-"} for test in by]
    confirm(Tree(), found)  # type: ignore[arg-type]
    assert [(r["by"], r["how"]) for r in found] == [("sound", "nearest")] + [
        ("", "-")
    ] * 4


def test_the_gate_asks_for_95_of_100_and_for_90_by_the_nearest() -> None:
    assert told(results(90, 5, 5)) == 0
    assert told(results(90, 4, 6)) == 1
    assert told(results(89, 8, 3)) == 1
    assert told(results(9, 1, 0)) == 0
