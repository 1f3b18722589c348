"""The include graph is the architecture: a folder may use only what is below it."""

import ast
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import run_alone

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)

# Every folder, lowest first: of C, and of ctrainer. A file may use its own folder's
# files and those of lower rows: no other folder of its own row. C and Python meet in
# ctrainer._C alone, so each language has its own half of a row.
LAYERS: tuple[tuple[set[str], set[str]], ...] = (
    ({"math"}, set()),
    ({"core/base"}, set()),
    ({"core/device"}, set()),
    ({"core/comm"}, set()),
    ({"cpu"}, set()),
    (
        {"core/schedule", "core/optim", "core/data", "core/checkpoint"},
        {"_cuda", "checkpoint", "enums", "memory_tracker", "runtime"},
    ),
    ({"core/engine"}, {"arguments", "trainer_state", "trainer_utils"}),
    (
        {"core/ddp", "core/fsdp", "core/bmuf", "cuda"},
        {"_rank_options", "callbacks", "deepspeed_schedules", "schedules"},
    ),
    ({"binding/runtime"}, {"display", "optim"}),
    (
        {"binding/comm", "binding/checkpoint", "binding/callbacks", "binding/schedule"},
        {"comm"},
    ),
    ({"binding/data", "binding/optim"}, {"adapters", "integrations"}),
    (
        {"binding/engine", "binding/ddp", "binding/fsdp", "binding/bmuf"},
        {"average", "bmuf", "fsdp", "introspect", "throughput", "trainer_pt_utils"}
        | {"plotting", "progress", "training_args"},
    ),
    ({"binding/evaluate", "binding/fairseq"}, {"commands", "compat"}),
    ({"binding/trainer"}, {"fairseq", "trainer"}),
    ({"binding"}, {"__init__", "__main__", "hf", "seq2seq"}),
)
C_LAYERS = tuple(c for c, _ in LAYERS)
PYTHON_LAYERS = tuple(python for _, python in LAYERS)
# What every type finds its module's state by is the module itself.
MODULE = "ctpy_module"
# Who may include a header, by its first path component. cuda/module.c is the one
# exception to "Python.h in the binding only": it hands over the plugin's tables.
ONLY_IN = {
    "Python.h": ("csrc/binding/", "cuda/module.c"),
    "structmember.h": ("csrc/binding/", "cuda/module.c"),
    "numpy": ("csrc/binding/",),
    "cuda_runtime.h": ("cuda/",),
    "cuda_runtime_api.h": ("cuda/",),
    "cuda.h": ("cuda/",),
    "dlfcn.h": ("cuda/dynlib.c", "csrc/cpu/gemm.c", "csrc/binding/"),
    "torch": (),
    "ATen": (),
    "c10": (),
    "pybind11": (),
    "cublas_v2.h": (),  # found at run time: a build must not need the wheels
    "nccl.h": (),
}
# Python packages that one layer only may import, wherever the statement stands.
FRAMEWORKS = {
    "torch": (
        "adapters/",
        "checkpoint/torch_files.py",  # as torch.save and torch.load
        "comm/",
        "compat/",
        "fairseq/criterions/",  # models, their losses and batches: torch is their
        "fairseq/data/",  # subject, as it is that of fairseq's
        "fairseq/models/",
        "fairseq/modules/",
        "fairseq/utils.py",
        "fairseq/wrappers.py",
        "fsdp/",
        "optim/",
        "hf.py",
        "runtime/torch_process.py",  # seeds and devices of the process
        "schedules.py",  # the schedules on a metric are torch's and transformers'
    ),
    "transformers": ("adapters/", "integrations/", "hf.py", "optim/", "schedules.py"),
    "accelerate": ("adapters/", "integrations/"),
    "mpi4py": ("comm/",),
    "deepspeed": (),
    "fairseq": ("fairseq/_guest.py", "fairseq/_install.py"),
    "fairscale": (),
}


def c_sources() -> list[Path]:
    suffixes = {".c", ".h", ".cu", ".cuh", ".def"}
    found = [p for top in ("csrc", "cuda") for p in (ROOT / top).rglob("*")]
    return sorted(p for p in found if p.suffix in suffixes)


def headers() -> list[Path]:
    return [p for p in c_sources() if p.suffix in {".h", ".cuh"}]


def python_sources() -> list[Path]:
    return sorted((ROOT / "ctrainer").rglob("*.py"))


def includes(path: Path) -> list[tuple[str, str]]:
    return INCLUDE.findall(path.read_text())


def folder(path: str) -> str:
    """The row's name for a file below csrc/, or of cuda/."""
    parts = Path(path).parts[:-1]
    return "/".join(parts[:2])


def layer(name: str) -> int:
    return next(i for i, row in enumerate(C_LAYERS) if name in row)


def may_use(user: str, used: str) -> bool:
    return user == used or layer(used) < layer(user)


def below_csrc(path: Path) -> str:
    top = ROOT if path.is_relative_to(ROOT / "cuda") else ROOT / "csrc"
    return path.relative_to(top).as_posix()


def test_there_is_something_to_check() -> None:
    assert len(c_sources()) > 20
    assert len(python_sources()) > 1
    assert len(LAYERS) <= 20


def test_every_folder_is_in_the_table_and_small() -> None:
    assert {folder_of(path) for path in c_sources()} == set[str]().union(*C_LAYERS)
    sizes = Counter(path.parent for path in c_sources())
    assert {path: n for path, n in sizes.items() if n > 40} == {}


def folder_of(path: Path) -> str:
    name = folder(below_csrc(path))
    return name.split("/")[0] if name.startswith(("math", "cpu")) else name


def test_includes_point_downwards() -> None:
    own = {below_csrc(path): path for path in c_sources()}
    wrong = []
    for name, path in own.items():
        for quote, included in includes(path):
            used = own.get(included) or own.get(f"{path.parent.name}/{included}")
            if quote == '"' and used and not may_use(folder_of(path), folder_of(used)):
                wrong.append(f"{name} includes {included}")
    assert not wrong, "\n".join(wrong)


def symbols(path: Path) -> tuple[set[str], set[str]]:
    """What an object file defines for others, and what it takes from them."""
    done = subprocess.run(["nm", path], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    defined = {
        line[-1] for line in lines if line[-2] not in "Uw" and line[-2].isupper()
    }
    return defined, {line[-1] for line in lines if line[-2] == "U"}


def linked() -> list[tuple[str, str, str]]:
    """(file, file it takes a symbol from, symbol) over the extension's objects."""
    tables = {}
    for path in (ROOT / "csrc").rglob("*.c"):
        source = path.relative_to(ROOT).with_suffix(".o")
        built = [*ROOT.glob(f"build/temp.*/{source}")]
        if not built:
            pytest.skip(f"{source} is not built in place")
        newest = max(built, key=lambda b: b.stat().st_mtime)
        tables[below_csrc(path)] = symbols(newest)
    owner = {name: file for file, (own, _) in tables.items() for name in own}
    return [
        (file, owner[name], name)
        for file, (_, taken) in tables.items()
        for name in sorted(taken & owner.keys())
        if owner[name] != file and name != MODULE
    ]


def test_objects_take_symbols_from_below() -> None:
    wrong = [
        f"{user} takes {name} from {used}"
        for user, used, name in linked()
        if not may_use(folder_of(ROOT / "csrc" / user), folder_of(ROOT / "csrc" / used))
    ]
    assert not wrong, "\n".join(wrong)


def test_files_do_not_need_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for user, used, _ in linked():
        graph.setdefault(user, set()).add(used)
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for used in sorted(graph.get(name, ())):
                walk(used, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        walk(name, ())


def test_foreign_headers_stay_in_their_layer() -> None:
    wrong = []
    for path in c_sources():
        here = path.relative_to(ROOT).as_posix()
        for quote, name in includes(path):
            if quote == '"' and (path.parent / name).exists():
                continue  # a neighbour of that name is ours
            allowed = ONLY_IN.get(name.split("/")[0])
            if allowed is not None and not here.startswith(allowed or ("\0",)):
                wrong.append(f"{here} includes {name}")
    assert not wrong, "\n".join(wrong)


def test_headers_do_not_include_each_other_in_a_circle() -> None:
    known = {p.relative_to(ROOT / "csrc").as_posix(): p for p in headers()
             if p.is_relative_to(ROOT / "csrc")}  # fmt: skip
    graph = {
        name: [n for _, n in includes(path) if n in known]
        for name, path in known.items()
    }

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        for below in graph[name]:
            walk(below, (*trail, name))

    for name in graph:
        walk(name, ())


def is_template(path: Path) -> bool:
    """Included once for each type or instruction set: a formula, a kernel's body."""
    return path.parent.name in {"body", "formula"} or bool(
        re.search(r"_body\.h$|each_|^expand\.h$", path.name)
    )


@pytest.mark.parametrize("path", headers(), ids=lambda p: p.name)
def test_a_header_has_a_guard_unless_it_is_a_template(path: Path) -> None:
    guard = re.search(r"#ifndef (\w+_(?:H|CUH))\n#define (\w+)\n", path.read_text())
    assert (guard is None) == is_template(path)
    assert guard is None or guard[1] == guard[2]


@pytest.mark.parametrize("compiler", [("cc", "c", "c11"), ("c++", "c++", "c++17")])
def test_core_headers_compile_alone_as_c_and_cpp(compiler: tuple[str, ...]) -> None:
    command, language, standard = compiler
    alone = [p for p in headers() if below_csrc(p).startswith(("math/", "core/"))]
    for path in alone:
        if is_template(path):
            continue
        done = subprocess.run(
            [command, "-x", language, f"-std={standard}", "-fsyntax-only",
             "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-"],
            input=f'#include "{below_csrc(path)}"\n',
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{path.name} as {language}:\n{done.stderr}"


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, level) of every import, lazy and by string ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and node.module != "ctrainer":
                yield node.module, node.level
            else:
                top = f"{node.module}." if node.module else ""
                yield from ((top + alias.name, node.level) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            first = node.args[0]
            if called.endswith(("import_module", "__import__")) and isinstance(
                first, ast.Constant
            ):
                yield str(first.value), 0


def without_type_checking(tree: ast.Module) -> ast.Module:
    """Drops `if TYPE_CHECKING:` bodies, which no interpreter runs."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            if ast.unparse(node.test).endswith("TYPE_CHECKING"):
                return [self.visit(n) for n in node.orelse]
            self.generic_visit(node)
            return node

    return Drop().visit(tree)


def run_imports(path: Path) -> list[tuple[str, int]]:
    return list(imports(without_type_checking(ast.parse(path.read_text()))))


def test_frameworks_are_imported_where_the_design_says() -> None:
    wrong = []
    for path in python_sources():
        here = path.relative_to(ROOT / "ctrainer").as_posix()
        for name, level in run_imports(path):
            allowed = FRAMEWORKS.get(name.split(".")[0])
            if level == 0 and allowed is not None:
                if not here.startswith(allowed or ("\0",)):
                    wrong.append(f"ctrainer/{here} imports {name}")
    assert not wrong, "\n".join(wrong)


def own_module(path: Path, name: str, level: int) -> str | None:
    """The top-level module of ctrainer that an import means, or None."""
    if level == 0:
        parts = name.split(".")
        return parts[1] if parts[0] == "ctrainer" and len(parts) > 1 else None
    folder = path.parent
    for _ in range(level - 1):
        folder = folder.parent
    inside = folder.relative_to(ROOT / "ctrainer").parts
    return (*inside, *name.split("."))[0]


def python_row(name: str) -> int:
    return next(i for i, row in enumerate(PYTHON_LAYERS) if name in row)


def python_uses() -> Iterator[tuple[Path, str, str]]:
    """File, its package, a package that it imports."""
    known = set[str]().union(*PYTHON_LAYERS)
    for path in python_sources():
        user = path.relative_to(ROOT / "ctrainer").parts[0].removesuffix(".py")
        for name, level in run_imports(path):
            used = own_module(path, name, level)
            if used in known and used != user:
                yield path, user, used


def test_every_python_package_is_in_the_table_and_small() -> None:
    found = {
        path.relative_to(ROOT / "ctrainer").parts[0].removesuffix(".py")
        for path in python_sources()
    }
    assert found == set[str]().union(*PYTHON_LAYERS)
    folders = {path.parent for path in python_sources()}
    sizes = {folder.name: len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: n for name, n in sizes.items() if n > 40} == {}


def test_python_packages_import_from_below() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports ctrainer.{used}"
        for path, user, used in python_uses()
        if python_row(used) >= python_row(user)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_trainer_is_of_four_classes() -> None:
    from ctrainer.trainer import Trainer

    names = [f"{cls.__module__}.{cls.__name__}" for cls in Trainer.__mro__]
    assert len(names) == 5, names  # with object


def test_import_ctrainer_loads_no_framework() -> None:
    done = run_alone("loaded", "ctrainer", "--", *FRAMEWORKS)
    done.check_returncode()
    assert done.stdout.strip() == "[]"


def test_extension_links_no_cuda_and_no_framework() -> None:
    built = ROOT / "ctrainer" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        pytest.skip(f"{built.name} is not built in place")
    done = subprocess.run(
        ["readelf", "-d", built], capture_output=True, text=True, check=True
    )
    needed = re.findall(r"NEEDED.*\[(.+)\]", done.stdout)
    assert needed
    assert not re.findall(r"cuda|nccl|cublas|torch|gomp|stdc\+\+", " ".join(needed))
