"""Compilers keep the prefetches of an update."""

from __future__ import annotations

import platform
import re
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
OF_STATE, OF_A_TENSOR = (
    5,
    6,
)  # prefetches in prefetch_state() and ctpy_prefetch_tensor()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are x86's")
@pytest.mark.parametrize("level", ["-O2", "-O3"])
def test_the_engine_s_prefetches_are_in_its_machine_code(level: str) -> None:
    """GCC deletes calls of functions that it takes to do nothing."""
    headers = [ROOT / "csrc", sysconfig.get_path("include"), np.get_include()]
    command = ["gcc", level, "-std=c11", *(f"-I{folder}" for folder in headers)]
    command += ["-S", "-o-", str(ROOT / "csrc/binding/optim/update.c")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+prefetch\w+\s", code, re.MULTILINE)
    assert len(found) >= OF_STATE + OF_A_TENSOR
