"""The CUDA plugin over the emulation, as a Python module."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

from places import ROOT

LIBRARY = ROOT / "build/emul/_cuda.so"


def load() -> Any:
    """ctrainer._cuda of the emulation, built if need be; its NCCL needs its symbols."""
    made = subprocess.run(
        ["make", "-s", "cuda-emul-python"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    spec = importlib.util.spec_from_file_location("_cuda", LIBRARY)
    assert spec is not None
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        module = importlib.util.module_from_spec(spec)
    finally:
        sys.setdlopenflags(flags)
    wheels = str(LIBRARY.parent / "wheels")
    sys.path.insert(0, wheels)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    sys.path.remove(wheels)
    return module
