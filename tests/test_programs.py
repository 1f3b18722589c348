"""What tests run in other processes are modules: linted, found by search, with lines
that a traceback can show."""

import ast
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CODE = (
    ast.Assert, ast.Assign, ast.AugAssign, ast.ClassDef, ast.For, ast.FunctionDef,
    ast.If, ast.Import, ast.ImportFrom, ast.Raise, ast.Return, ast.Try, ast.While,
    ast.With,
)  # fmt: skip
# What is not the tests' own code, but what they test.
SUBJECTS = {
    "test_mutants.py": "functions of which faults are made",
    "test_programs.py": "the examples below",
}


def is_code(text: str) -> bool:
    """Several lines or statements of Python, which do more than name something."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is in regular expressions
            body = ast.parse(textwrap.dedent(text)).body
    except (SyntaxError, ValueError):
        return False
    several = len(body) > 1 or len(text.strip().splitlines()) > 1
    return several and any(isinstance(statement, CODE) for statement in body)


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings with their lines; what an f-string or % puts in stands for a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = node.values
            yield (
                node.lineno,
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "x"
                    for part in parts
                ),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value.replace("%r", "x").replace("%s", "x")


def commands(tree: ast.AST) -> Iterator[int]:
    """The lines of commands that give the interpreter its program as an argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            words = [ast.unparse(word) for word in node.elts]
            if "sys.executable" in words and "'-c'" in words:
                yield node.lineno


def found_in(source: str) -> list[int]:
    tree = ast.parse(source)
    lines = [line for line, text in texts(tree) if is_code(text)]
    return sorted({*lines, *commands(tree)})


def test_no_test_has_python_in_a_string() -> None:
    found, subjects = [], set()
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        lines = found_in(path.read_text())
        if name in SUBJECTS:
            subjects.update([name] if lines else [])
            continue
        found += [f"tests/{name}:{line}" for line in lines]
    assert not found, (
        "make a module of tests/programs of it, and run that with ranks.run or "
        f"ranks.run_alone: {found}"
    )
    assert subjects == SUBJECTS.keys()


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('CODE = """\nimport sys\nprint(sys.path)\n"""', True),
        ('code = "import sys; print(sys.path)"', True),
        ('code = f"x = {1}\\nprint(x)\\n"', True),
        ('code = "x = %r\\nprint(x)\\n"', True),
        ('run([sys.executable, "-c", given])', True),
        ('"""Words in\ntwo lines."""', False),
        ('yaml = "common: {seed: 1}\\ntask: lm\\n"', False),
        ('run(["bash", "-c", given])', False),
    ],
)
def test_code_is_told_from_other_text(source: str, is_found: bool) -> None:
    assert (found_in(source) != []) == is_found
