"""make dist: an sdist, a wheel built from the sdist alone, and tests of the wheel.

All of it happens outside the checkout; build/dist gets the two files.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 3_000_000
TESTS = [f"tests/binding/{part}" for part in ("checkpoint", "comm", "data", "optim")]


def run(*command: str | Path, cwd: Path, **changed: str) -> str:
    """The standard output of a command; SystemExit with all that it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**kept, **changed},
        text=True, capture_output=True,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def sdist(tree: Path, into: Path) -> Path:
    """Write the sdist of a tree; the files of a former one are forgotten."""
    for former in tree.glob("*.egg-info"):
        shutil.rmtree(former)
    program = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", program, into, cwd=tree)
    (file,) = into.glob("ctrainer-*.tar.gz")
    return file


def wheel(
    sources: Path, into: Path, python: str | Path = sys.executable, **changed: str
) -> Path:
    """Build the wheel of unpacked sources, without the CUDA plugin.

    changed: variables of the environment.
    """
    program = (
        "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    )
    command = (python, "-c", program, into)
    return into / run(*command, cwd=sources, CTRAINER_CUDA="0", **changed).split()[-1]


def unpacked_extension(file: Path, folder: Path) -> Path:
    """The one shared object of a wheel, as a file."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".so"))
        return Path(archive.extract(name, folder))


def check_wheel(file: Path) -> None:
    """SystemExit unless the wheel is small and its extension stripped."""
    if file.stat().st_size > MOST_BYTES:
        sys.exit(f"{file.name} has {file.stat().st_size} bytes, of {MOST_BYTES}")
    with tempfile.TemporaryDirectory() as folder:
        extension = unpacked_extension(file, Path(folder))
        sections = run("readelf", "-SW", extension, cwd=ROOT)
    left = re.findall(r"\.(?:debug_\w+|symtab)\b", sections)
    if left:
        sys.exit(f"{extension.name} is not stripped: it has {', '.join(left)}")


@contextlib.contextmanager
def installed(file: Path, python: str | Path, *more: Path) -> Iterator[Path]:
    """The interpreter of a new environment with a wheel and NumPy; at the end it goes.

    more: wheels that are installed beside it, without what these need.
    """
    with tempfile.TemporaryDirectory(prefix="ctrainer-smoke-") as folder:
        home = Path(folder)
        run(python, "-m", "venv", "env", cwd=home)
        inside = home / "env/bin/python"
        pip = (inside, "-m", "pip", "install", "-q", "--disable-pip-version-check")
        run(*pip, file, cwd=home)
        if more:
            run(*pip, "--no-deps", *more, cwd=home)
        yield inside


def smoke(file: Path, python: str | Path = sys.executable, *more: Path) -> str:
    """Train with a wheel, and those beside it, in a new environment: the verdict."""
    with installed(file, python, *more) as inside:
        home = inside.parents[2]
        program = shutil.copy(ROOT / "release/smoke.py", home)
        plugin = ["--plugin"] if more else []
        return run(inside, "-I", program, *plugin, cwd=home).splitlines()[-1]


def tested(file: Path, sources: Path) -> str:
    """Run tests of the sdist with its wheel in a new environment: pytest's sum.

    Torch and the other packages of the tests are this interpreter's.
    """
    for own in ("ctrainer", "csrc", "cuda"):
        shutil.rmtree(sources / own)
    with installed(file, sys.executable) as inside:
        site = run(inside, "-c", "import numpy; print(numpy.__path__[0])", cwd=sources)
        paths = Path(site.strip()).parent / "packages_of_the_tests.pth"
        paths.write_text(sysconfig.get_path("purelib"))
        told = run(inside, "-m", "pytest", *TESTS, cwd=sources)
        return told.splitlines()[-1].strip("= ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "build/dist")
    options = parser.parse_args()
    shutil.rmtree(options.into, ignore_errors=True)
    options.into.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="ctrainer-dist-") as folder:
        archive = sdist(ROOT, options.into.resolve())
        shutil.unpack_archive(archive, folder)
        sources = Path(folder) / archive.name[:-7]
        built = wheel(sources, options.into.resolve())
        check_wheel(built)
        print(smoke(built))
        print(f"tests of the sdist with the wheel: {tested(built, sources)}")
    for file in (archive, built):
        print(f"{file.stat().st_size:>9,} bytes  {file}")


if __name__ == "__main__":
    main()
