"""What nvcc makes of the kernels, each file once until it changes: in build/nvcc."""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from draws import EXHAUSTIVE
from places import ROOT

_WHEELS = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin")
_PLACES = (
    f"{os.environ.get('PATH')}{os.pathsep}/usr/local/cuda/bin{os.pathsep}{_WHEELS}"
)
NVCC = os.environ.get("NVCC") or shutil.which("nvcc", path=_PLACES)
NVDISASM = shutil.which("nvdisasm", path=_PLACES)
SOURCES = sorted(
    p for p in (ROOT / "cuda").glob("*.cu") if "CT_KERNEL" in p.read_text()
)
BUILT_FOR = re.findall(
    r"\d+", re.findall(r'"([\d;]{9,})"', (ROOT / "setup.py").read_text())[0]
)
ARCHS = BUILT_FOR if EXHAUSTIVE else ["90"]


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@functools.cache
def _kept(source: Path) -> Path:
    """A folder for what is made of all that the compiler reads."""
    headers = [*(ROOT / "cuda").glob("*.*h"), *(ROOT / "csrc").rglob("*.[hd]*")]
    digest = hashlib.sha256(_run(NVCC or "", "--version").encode())
    for path in [source, Path(__file__), *sorted(headers)]:
        digest.update(path.read_bytes())
    folder = ROOT / "build/nvcc" / f"{source.stem}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _made(path: Path, *command: str | Path) -> str:
    """The text of a file, made by the command that ends with the file's name; what the
    command says is beside it."""
    if not path.exists():
        made = path.with_name(f"{path.name}.{os.getpid()}")
        path.with_suffix(".said").write_text(_run(*command, made))
        made.replace(path)
    return path.read_text(errors="replace")


def ptx(source: Path, arch: str, fmad: bool = False, log: bool = True) -> str:
    """nvcc's PTX with the build's flags, or with fused arithmetic, or without the
    logarithm of CUDA's library."""
    path = _kept(source) / f"{arch}{'-fmad' * fmad}{'-no-log' * (not log)}.ptx"
    left_out = () if log else ("-include", Path(__file__).with_name("without_log.h"))
    return _made(
        path, NVCC or "", "-std=c++17", "-O3", f"--fmad={str(fmad).lower()}",
        f"-arch=compute_{arch}", f"-I{ROOT / 'csrc'}", *left_out, "-ptx", source, "-o",
    )  # fmt: skip


def machine_code(source: Path, arch: str) -> tuple[str, str]:
    """What ptxas says of each kernel's registers and stack, and the instructions."""
    path = _kept(source) / f"{arch}.cubin"
    ptx(source, arch)
    _made(
        path, NVCC or "", "-cubin", f"-arch=sm_{arch}", "--fmad=false",
        "--resource-usage", path.with_suffix(".ptx"), "-o",
    )  # fmt: skip
    return path.with_suffix(".said").read_text(), _run(NVDISASM or "", "-c", path)
