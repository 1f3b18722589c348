"""The include graph is the architecture: a folder may use only what is below it."""

import ast
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)

BELOW = {
    "math": {"math"},
    "core": {"core", "math"},
    "cpu": {"cpu", "core", "math"},
    "cuda": {"cuda", "core", "math"},
    "binding": {"binding", "cpu", "core", "math"},
}
# Who may include a header, by its first path component. cuda/module.c is the one
# exception to "Python.h in the binding only": it hands over the plugin's tables.
ONLY_IN = {
    "Python.h": ("csrc/binding/", "cuda/module.c"),
    "structmember.h": ("csrc/binding/", "cuda/module.c"),
    "numpy": ("csrc/binding/",),
    "cuda_runtime.h": ("cuda/",),
    "cuda_runtime_api.h": ("cuda/",),
    "cuda.h": ("cuda/",),
    "dlfcn.h": ("cuda/dynlib.c", "csrc/cpu/blas.c", "csrc/binding/"),
    "torch": (),
    "ATen": (),
    "c10": (),
    "pybind11": (),
    "cublas_v2.h": (),  # found at run time: a build must not need the wheels
    "nccl.h": (),
}
# The core's own floors, lowest first. What is not named stands on the floor of
# policies, between devices and optimizers.
FLOORS = (
    {"ct_status", "ct_alloc", "ct_dtype", "ct_span", "ct_pool"}
    | {"ct_crc32c", "ct_crc_table", "ct_io", "ct_deadline", "ct_segment", "ct_crew"}
    | {"ct_copy_far", "ct_interrupt", "ct_lanes", "ct_packet", "ct_pages"}
    | {"ct_malloc", "ct_mapping", "ct_owner", "ct_segment_hold", "ct_rank_names"},
    {"ct_adamw", "ct_hyper", "ct_sgd"},
    {"ct_codes", "ct_factored", "ct_update"},
    {"ct_device", "ct_plugin", "ct_reduce", "ct_reduce_body"}
    | {"ct_comm", "ct_comm_bytes", "ct_comm_memory"}
    | {"ct_comm_levels", "ct_comm_padded", "ct_comm_split", "ct_history"}
    | {"ct_comm_self", "ct_comm_shm", "ct_comm_sync"}
    | {"ct_exchange", "ct_exchange_slots", "ct_shm_queue"}
    | {"ct_levels", "ct_levels_reduce"},
    set[str](),
    {"ct_optim", "ct_optim_kind", "ct_optim_kind_whole", "ct_optim_run"}
    | {"ct_optim_muon", "ct_optim_muon_parts", "ct_optim_parts"},
    {"ct_bucket", "ct_codec", "ct_codec_half", "ct_reducer"}
    | {"ct_fsdp", "ct_fsdp_codes", "ct_fsdp_offload", "ct_fsdp_prefetch"}
    | {"ct_fsdp_presence"}
    | {"ct_bmuf", "ct_bmuf_batch", "ct_bmuf_codes", "ct_bmuf_config"}
    | {"ct_bmuf_flight"}
    | {"ct_bmuf_join", "ct_bmuf_meet", "ct_bmuf_pass"}
    | {"ct_step", "ct_probe"},
)
POLICIES = FLOORS.index(set())

# Python packages that one layer only may import, wherever the statement stands.
FRAMEWORKS = {
    "torch": (
        "adapters/",
        "comm/",
        "compat/",
        "fairseq/criterions/",  # models, their losses and batches: torch is their
        "fairseq/data/",  # subject, as it is that of fairseq's
        "fairseq/models/",
        "fairseq/modules/",
        "fairseq/utils.py",
        "fsdp/",
        "optim/",
        "hf.py",
    ),
    "transformers": ("adapters/", "integrations/", "hf.py", "optim/"),
    "accelerate": ("adapters/", "integrations/"),
    "mpi4py": ("comm/",),
    "deepspeed": (),
    "fairseq": ("fairseq/_cures.py", "fairseq/_guest.py", "fairseq/_install.py"),
    "fairscale": (),
}
# Packages and modules of ctrainer that know nothing of a trainer.
BELOW_TRAINER = (
    "adapters/",
    "arguments/",
    "average.py",
    "callbacks.py",
    "checkpoint/",
    "comm/",
    "display/",
    "enums.py",
    "fsdp/",
    "integrations/",
    "introspect.py",
    "memory_tracker.py",
    "optim/",
    "runtime/",
    "schedules.py",
    "trainer_state.py",
    "trainer_utils.py",
    "training_args.py",
)
TRAINERS = re.compile(r"(trainer|seq2seq|hf|fairseq|__main__)$")


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


def included_layer(path: Path, name: str) -> str:
    """The layer that an include names; one without a folder is a neighbour's."""
    return name.split("/")[0] if "/" in name else path.parent.name


def floor(path_or_name: str) -> int:
    stem = Path(path_or_name).stem
    at = [i for i, names in enumerate(FLOORS) if stem in names]
    return at[0] if at else POLICIES


def test_there_is_something_to_check() -> None:
    assert len(c_sources()) > 20
    assert len(python_sources()) > 1


def test_includes_point_downwards() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} includes {name}"
        for path in c_sources()
        for quote, name in includes(path)
        if quote == '"'
        and included_layer(path, name) in BELOW
        and included_layer(path, name) not in BELOW[path.parent.name]
    ]
    assert not wrong, "\n".join(wrong)


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


def test_the_core_is_layered_in_itself() -> None:
    wrong = [
        f"{path.name} includes {name}"
        for path in (ROOT / "csrc/core").glob("*.[ch]")
        for _, name in includes(path)
        if name.startswith("core/") and floor(name) > floor(path.name)
    ]
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
    return bool(re.search(r"_body\.h$|_formula\.h$|each_|^expand\.h$", path.name))


@pytest.mark.parametrize("path", headers(), ids=lambda p: p.name)
def test_a_header_has_a_guard_unless_it_is_a_template(path: Path) -> None:
    guard = re.search(r"#ifndef (\w+_(?:H|CUH))\n#define (\w+)\n", path.read_text())
    assert (guard is None) == is_template(path)
    assert guard is None or guard[1] == guard[2]


@pytest.mark.parametrize("compiler", [("cc", "c", "c11"), ("c++", "c++", "c++17")])
def test_core_headers_compile_alone_as_c_and_cpp(compiler: tuple[str, ...]) -> None:
    command, language, standard = compiler
    alone = [p for p in headers() if p.parent.name in {"math", "core"}]
    for path in alone:
        if is_template(path):
            continue
        done = subprocess.run(
            [command, "-x", language, f"-std={standard}", "-fsyntax-only",
             "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-"],
            input=f'#include "{path.parent.name}/{path.name}"\n',
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


def test_lower_python_modules_do_not_know_the_trainer() -> None:
    wrong = []
    for path in python_sources():
        here = path.relative_to(ROOT / "ctrainer").as_posix()
        for name, level in run_imports(path):
            used = own_module(path, name, level)
            if here.startswith(BELOW_TRAINER) and TRAINERS.match(used or ""):
                wrong.append(f"ctrainer/{here} imports ctrainer.{used}")
    assert not wrong, "\n".join(wrong)


def test_import_ctrainer_loads_no_framework() -> None:
    names = ", ".join(map(repr, FRAMEWORKS))
    code = f"import sys, ctrainer; print([n for n in ({names},) if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
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
