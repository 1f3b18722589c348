"""The CUDA plugin over the emulation, as a Python module."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import ROOT

FOLDER = ROOT / "build/emul"
LIBRARY = FOLDER / "_cuda.so"
LOADED: set[str] = set()  # what this process has


def load(target: str = "cuda-emul-python", library: Path = LIBRARY) -> Any:
    """ctrainer._cuda of the emulation, which make builds if need be, unless this is a
    rank, whose test has; its NCCL, and a device of torch, need its symbols."""
    if "RANK" not in os.environ:
        made = subprocess.run(
            ["make", "-s", f"PY={sys.executable}", target], cwd=ROOT,
            capture_output=True, text=True,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
    spec = importlib.util.spec_from_file_location("_cuda", library)
    assert spec is not None
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        module = importlib.util.module_from_spec(spec)
    finally:
        sys.setdlopenflags(flags)
    wheels = str(FOLDER / "wheels")
    sys.path.insert(0, wheels)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    LOADED.add(module.__name__)
    sys.path.remove(wheels)
    return module


def be_host(number: int) -> None:
    """The calling thread is a host of its own, with a NULL stream of its own."""
    ctypes.CDLL(str(LIBRARY)).emul_be_host(number)
