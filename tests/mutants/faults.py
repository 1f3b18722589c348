"""Faults of one line each that could have been written, in C, CUDA and Python.

An operator finds its places in a file: in C by patterns over the lines of function
bodies, which clang-format keeps in one shape, in Python in the syntax tree. What only
gives memory back is left alone: `make asan` looks for leaks.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DELETE = "delete a call"
NEGATE = "negate a condition"
SWAP = "swap operands"
OFF_BY_ONE = "off by one"
UNSYNCHRONISED = "drop a synchronisation"
SKIP = "skip a check"
WRONG = "wrong stream or rank"


@dataclass(frozen=True)
class Fault:
    """Line `line` of `path` reads `after` instead of `before`."""

    path: str
    line: int
    operator: str
    before: str
    after: str

    def applied(self, text: str) -> str:
        lines = text.split("\n")
        found = lines[self.line - 1]
        assert found == self.before, f"{self.path}:{self.line} is {found!r} by now"
        lines[self.line - 1] = self.after
        return "\n".join(lines)

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.operator}\n"
            f"  - {self.before.strip()}\n  + {self.after.strip()}"
        )


@functools.cache
def faults(root: Path, path: str) -> list[Fault]:
    """Every fault that an operator makes in a file, in the order of its lines."""
    text = (root / path).read_text()
    found = python_faults(text) if path.endswith(".py") else c_faults(text)
    lines = text.split("\n")
    made = {
        Fault(path, line, operator, lines[line - 1], after)
        for line, operator, after in found
        if after != lines[line - 1]
    }
    return sorted(made, key=lambda f: (f.line, f.operator, f.after))


OFF = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
Found = tuple[int, str, str]

# ---- C and CUDA

CALL = re.compile(r"(\s+)(?:\(void\))?([a-z_]\w*(?:(?:->|\.)\w+)*)\(.*\);$")
IF = re.compile(r"(\s+)((?:\} else )?if|while) \((.*)\) \{$")
FOR = re.compile(r"\s+for \(")
SYNCHRONISES = re.compile(r"lock|barrier|sync|wait|fence|join|signal|broadcast")
RELEASES = re.compile(
    r"free|decref|clear|close|release|fini(?!sh)|trim|unmap|assert|prefetch|Py_",
    re.IGNORECASE,
)
LEAVES = re.compile(r"\s*(return|goto|break|continue|status =|PyErr_)")
OPERAND = r"[\w.]+(?:->[\w.]+)*(?:\[[^\[\]]+\])?"
SWAPPED = re.compile(rf"({OPERAND}) (-|/|%|<|>) ({OPERAND})(?![\w(])")
BOUND = re.compile(r"(?<= )(<=|>=|<|>)(?= )")
CHOICE = re.compile(r" (.+?) \? (.+?) : (.+?)\)*[;,]")
ONE = re.compile(r" [-+] 1\b(?!\.)")
RANK = re.compile(r"\b(?:\w+(?:->|\.))+(?:rank|world_size)\b(?! [-+*/|&]?= )")
STREAM = re.compile(r"(?<=[(,] )stream\b|(?<=\()stream\b")


def c_faults(text: str) -> Iterator[Found]:
    lines = text.split("\n")
    inside = False
    for number, line in enumerate(lines[:-1], 1):
        if line in "{}":
            inside = line == "{"
        elif line.startswith("}"):
            inside = False
        before = lines[number - 2].rstrip() if number > 1 else ""
        code = not re.match(r"\s*(/\*|\*|//|#|\"|case .*:$)", line)
        if inside and line and line[0] == " " and code:
            whole = before.endswith((";", "{", "}", ":", "*/"))
            yield from c_line(number, line, lines[number], whole)


def c_line(number: int, line: str, following: str, whole: bool) -> Iterator[Found]:
    """whole: the line begins a statement."""
    call = CALL.match(line)
    if call and whole and not RELEASES.search(call[2]):
        operator = UNSYNCHRONISED if SYNCHRONISES.search(call[2]) else DELETE
        yield number, operator, f"{call[1]};"
    condition = IF.match(line)
    if condition:
        indent, keyword, test = condition.groups()
        yield number, NEGATE, f"{indent}{keyword} (!({test})) {{"
        if LEAVES.match(following) and "if" in keyword:
            yield number, SKIP, f"{indent}{keyword} (0 && ({test})) {{"
    releasing = CALL.match(following)
    if '"' in line or (releasing and RELEASES.search(releasing[2]) and FOR.match(line)):
        return  # what a message says, and which memory a loop gives back
    for found in SWAPPED.finditer(line):
        a, operation, b = found.groups()
        after = f"{line[: found.start()]}{b} {operation} {a}{line[found.end() :]}"
        yield number, SWAP, after
    for found in BOUND.finditer(line):
        if is_extreme(line[: found.start()], line[found.end() :]):
            continue
        after = line[: found.start()] + OFF[found[0]] + line[found.end() :]
        yield number, OFF_BY_ONE, after
    for found in ONE.finditer(line):
        yield number, OFF_BY_ONE, line[: found.start()] + line[found.end() :]
    for found in RANK.finditer(line):
        after = f"{line[: found.start()]}({found[0]} + 1){line[found.end() :]}"
        yield number, WRONG, after
    for found in STREAM.finditer(line):
        yield number, WRONG, line[: found.start()] + "NULL" + line[found.end() :]


def is_extreme(left: str, right: str) -> bool:
    """Whether the smaller or the larger of two is chosen: where they are equal, either
    is, so that the bound itself decides nothing."""
    choice = CHOICE.match(right)
    if choice is None:
        return False
    compared, *chosen = choice.groups()
    other = chosen[compared == chosen[0]]
    whole = re.compile(r"(?:[=(,?:|&]|return) +" + re.escape(other) + " $")
    alone = re.compile(r"\(" + re.escape(other) + " $")
    return compared in chosen and bool(whole.search(left) or alone.search(left))


# ---- Python

COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
SWAPPABLE = {ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}


def python_faults(text: str) -> Iterator[Found]:
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        for part, operator, after in python_node(node):
            if part.lineno == part.end_lineno:
                line = lines[part.lineno - 1]
                # Offsets are of bytes; a line with other letters is left out.
                if line.isascii():
                    yield (
                        part.lineno,
                        operator,
                        line[: part.col_offset] + after + line[part.end_col_offset :],
                    )


def python_node(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """The part that is replaced, the operator, and what takes its place."""
    match node:
        case ast.If(test=ast.Name("TYPE_CHECKING")):
            pass  # imports that nothing runs
        case ast.If(test=test, body=body):
            source = ast.unparse(test)
            yield test, NEGATE, f"not ({source})"
            if isinstance(body[0], ast.Raise | ast.Return | ast.Continue):
                yield test, SKIP, f"False and ({source})"
        case ast.Expr(value=ast.Call(func=function) as call):
            name = ast.unparse(function)
            operator = UNSYNCHRONISED if SYNCHRONISES.search(name) else DELETE
            if not RELEASES.search(name) and not name.startswith(("log", "warn")):
                yield call, operator, "..."
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            sign = COMPARED.get(type(operation))
            if sign:
                a, b = ast.unparse(left), ast.unparse(right)
                yield node, OFF_BY_ONE, f"{a} {OFF[sign]} {b}"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(1)):
            yield node, OFF_BY_ONE, f"({ast.unparse(left)})"
        case ast.BinOp(left=left, op=operation, right=right):
            sign = SWAPPABLE.get(type(operation))
            if sign and not isinstance(left, ast.Constant | ast.JoinedStr):
                swapped = f"({ast.unparse(right)}) {sign} ({ast.unparse(left)})"
                yield node, SWAP, f"({swapped})"
        case ast.Attribute(attr="rank" | "world_size", ctx=ast.Load()):
            yield node, WRONG, f"({ast.unparse(node)} + 1)"
