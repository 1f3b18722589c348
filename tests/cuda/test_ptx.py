"""What nvcc makes of the kernels: the arithmetic that was written, in a fixed order."""

import functools
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin")
NVCC = (
    os.environ.get("NVCC")
    or shutil.which("nvcc")
    or shutil.which("nvcc", path=f"/usr/local/cuda/bin{os.pathsep}{WHEELS}")
)
SOURCES = sorted(
    p for p in (ROOT / "cuda").glob("*.cu") if "CT_KERNEL" in p.read_text()
)

# A p-norm's powers are a function of CUDA's library; a norm has a bound, not bits, to
# agree with the CPU's.
EXACT = [p for p in SOURCES if p.name != "norm.cu"]

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


@functools.cache
def ptx(path: Path, *flags: str) -> str:
    done = subprocess.run(
        [NVCC, "-std=c++17", "-O3", *flags, "-arch=compute_75", f"-I{ROOT / 'csrc'}",
         "-ptx", str(path), "-o", "-"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXACT, ids=lambda p: p.name)
def test_nothing_is_fused_flushed_or_approximated(path: Path) -> None:
    text = ptx(path, "--fmad=false")
    assert ".entry" in text
    assert not re.findall(r"\bfma\.|\bmad\.f|\.ftz|\.approx", text)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_nothing_is_atomic(path: Path) -> None:
    assert not re.findall(r"\b(atom|red)\.", ptx(path, "--fmad=false"))


def test_without_the_flag_there_would_be_fused_arithmetic() -> None:
    assert "fma." in ptx(ROOT / "cuda/elementwise.cu")


def test_the_build_passes_the_flag() -> None:
    assert '"--fmad=false"' in (ROOT / "setup.py").read_text()
