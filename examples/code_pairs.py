"""Docstring and function pairs of a folder of Python, for the search example."""

import ast
import hashlib
import json
import sysconfig
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

# Vendored and test code repeats itself: searching it teaches nothing about search.
SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "node_modules"}
DOC_CHARS, CODE_CHARS = 300, 600
HELD_OUT_ONE_IN = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """What a function says it does, and the function without its name."""

    doc: str
    code: str
    path: str
    line: int
    signature: str

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]


def standard_library() -> Path:
    """The folder of the running Python's own library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(folder: Path) -> list[Path]:
    """Every Python file below a folder, vendored, hidden and test code aside."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not any(
            part in SKIPPED or part.startswith(".")
            for part in path.relative_to(folder).parts
        )
    )


def load_pairs(folder: Path, cache: Path) -> list[Pair]:
    """The pairs of a folder, read from the cache when no file changed since."""
    files = source_files(folder)
    if not files:
        raise SystemExit(f"{folder} holds no Python file to learn from")
    stamp = hashlib.sha256()
    for path in [Path(__file__), *files]:
        stamp.update(f"{path} {path.stat().st_mtime_ns}\n".encode())
    if cache.exists():
        cached = json.loads(cache.read_text())
        if cached["stamp"] == stamp.hexdigest():
            return [Pair(**row) for row in cached["pairs"]]
    pairs = unique(pair for path in files for pair in pairs_of_file(path, folder))
    cache.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(pair) for pair in pairs]
    cache.write_text(json.dumps({"stamp": stamp.hexdigest(), "pairs": rows}))
    return pairs


def pairs_of_file(path: Path, folder: Path) -> list[Pair]:
    """The pairs of one file; none where it is not Python of this version."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    where = path.relative_to(folder).as_posix()
    found = (pair_of_function(node, where) for node in ast.walk(tree))
    return [pair for pair in found if pair is not None]


def pair_of_function(node: ast.AST, where: str) -> Pair | None:
    """The pair of a documented function; None for anything else, or too little."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    doc = ast.get_docstring(node)
    if not doc or len(node.body) < 2:
        return None
    doc = " ".join(doc.split("\n\n")[0].split())
    signature = f"{node.name}({ast.unparse(node.args)})"
    hidden = type(node)("f", node.args, node.body[1:], [], node.returns)
    code = ast.unparse(ast.fix_missing_locations(hidden))
    if len(doc) < 20 or len(code) < 40:
        return None
    return Pair(doc[:DOC_CHARS], code[:CODE_CHARS], where, node.lineno, signature)


def unique(pairs) -> list[Pair]:
    """The first pair of each docstring: a copy would be in both halves of the split."""
    first: dict[str, Pair] = {}
    for pair in pairs:
        first.setdefault(pair.doc, pair)
    return list(first.values())


def digest(pair: Pair) -> str:
    """The same on every machine and in every run, which Python's own hash is not."""
    return hashlib.md5(pair.doc.encode(), usedforsecurity=False).hexdigest()


def split(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and pairs held out, each in an order without a pattern."""
    train: list[Pair] = []
    held_out: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: digest(pair)[::-1]):
        one_in = int(digest(pair), 16) % HELD_OUT_ONE_IN == 0
        (held_out if one_in else train).append(pair)
    return train, held_out
