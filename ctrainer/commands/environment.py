"""`ctrainer env`: the versions and settings that a report of a bug needs."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ctrainer import _C, __version__

_PACKAGES = ("numpy", "torch", "transformers", "accelerate", "safetensors", "fairseq")
_SETTINGS = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|"
    r"SLURM_(PROCID|LOCALID|NTASKS|JOB_NUM_NODES)|OMPI_COMM_WORLD_\w+|PMI_\w+|"
    r"ACCELERATE_\w+|CTRAINER_\w+|NCCL_\w+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
)


def describe(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each line of the report.

    No package is imported but NumPy, so that a broken one is reported, too.

    Args:
        environ (Mapping[str, str]): Environment variables, of which those of launchers,
            threads, GPUs and ctrainer are listed.
    """
    yield "ctrainer", f"{__version__} ({Path(_C.__file__ or '').parent})"
    yield "Python", f"{sys.version.split()[0]} ({sys.executable})"
    yield "system", platform.platform()
    for name in _PACKAGES:
        yield name, _version(name)
    yield "CPU", f"{os.cpu_count()} cores, {_C.cpu_isa()} instructions"
    yield "threads", f"{_C.get_num_threads()} of ctrainer"
    yield "GPUs", _gpus()
    yield from _plugin()
    settings = {k: v for k, v in sorted(environ.items()) if _SETTINGS.fullmatch(k)}
    yield "environment", " ".join(f"{k}={v}" for k, v in settings.items()) or "none set"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    """The driver's list of GPUs, which needs no package."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "none: there is no nvidia-smi"
    try:
        done = subprocess.run(
            [command, "--query-gpu=name,memory.total,driver_version", "--format=csv"],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    lines = done.stdout.strip().splitlines()
    return "; ".join(lines[1:]) if done.returncode == 0 else f"none: {' '.join(lines)}"


def _plugin() -> Iterator[tuple[str, str]]:
    try:
        from ctrainer import _cuda
    except ImportError as error:
        yield "CUDA plugin", f"not found: {error}"
        return
    why = _cuda.why_no_device()
    devices = f"no device: {why}" if why else f"{_cuda.device_count()} devices"
    yield "CUDA plugin", f"{_cuda.__file__}; {devices}"
    missing = "not found; pip install 'ctrainer[cuda13]'"
    names = {"runtime": "CUDA runtime", "driver": "CUDA driver", "cublas": "cuBLAS"}
    names["nccl"] = "NCCL"
    for name, version in _cuda.versions().items():
        library = name in ("cublas", "nccl")
        yield names[name], version or (missing if library else "not found")


def main(arguments: list[str]) -> int:
    """Print the report and return 0.

    Args:
        arguments (list[str]): None but --help.
    """
    parser = argparse.ArgumentParser(
        prog="ctrainer env",
        description="Print the versions and settings that a report of a bug needs.",
    )
    parser.parse_args(arguments)
    for name, value in describe(os.environ):
        print(f"{name:<13} {value}")
    return 0
