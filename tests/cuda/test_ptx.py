"""What nvcc makes of the kernels: the arithmetic that was written, in a fixed order."""

import re
from pathlib import Path

import pytest
from nvcc import ARCHS, NVCC, SOURCES, ptx
from places import ROOT

# A p-norm's powers are a function of CUDA's library, and the rests of its squares are
# fused on purpose; a norm has a bound, not bits, to agree with the CPU's.
EXACT = [p for p in SOURCES if p.name != "norm.cu"]
# The logarithm of a loss, too, is the library's; the gradient beside it has bits.
WITH_LOG = {"cross_entropy.cu"}

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
on_each = pytest.mark.parametrize("arch", ARCHS)


@on_each
@pytest.mark.parametrize("path", EXACT, ids=lambda p: p.name)
def test_nothing_is_fused_flushed_or_approximated(path: Path, arch: str) -> None:
    text = ptx(path, arch, log=path.name not in WITH_LOG)
    assert ".entry" in text
    assert not re.findall(r"\bfma\.|\bmad\.f|\.ftz|\.approx", text)


@on_each
@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_nothing_is_atomic(path: Path, arch: str) -> None:
    assert not re.findall(r"\b(atom|red)\.", ptx(path, arch))


def test_without_the_flag_there_would_be_fused_arithmetic() -> None:
    assert "fma." in ptx(ROOT / "cuda/elementwise.cu", "90", fmad=True)


def test_the_build_passes_the_flag() -> None:
    assert '"--fmad=false"' in (ROOT / "setup.py").read_text()
