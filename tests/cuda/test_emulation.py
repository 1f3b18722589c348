"""The sources of cuda/ give the CPU's results when they run on the host emulation."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from draws import draws

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(p.stem for p in (ROOT / "tests/cuda").glob("test_*.cpp"))

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None
    or shutil.which("make") is None
    or not (ROOT / "Makefile").exists(),
    reason="needs make and a C++ compiler",
)


@pytest.fixture(scope="module")
def built() -> Path:
    done = subprocess.run(
        ["make", "-s", "cuda-emul-build"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build/emul"


def test_there_are_programs() -> None:
    assert {"test_elementwise", "test_norm", "test_launch"} <= set(PROGRAMS)


@pytest.mark.parametrize("seed", range(1, 1 + draws(1, 8)))
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_agree_with_the_cpu(built: Path, program: str, seed: int) -> None:
    """The seed gives the order of streams, blocks, warps and lanes."""
    done = subprocess.run(
        [built / program], env=os.environ | {"CTRAINER_EMUL_SEED": str(seed)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
