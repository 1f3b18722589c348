"""Runs modules of tests/programs: as ranks that torchrun would start here, or alone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from places import PYTHONPATH

# Below the time-out of a test.
LIMIT_SECONDS = 280 if os.environ.get("CTRAINER_EXHAUSTIVE") != "1" else 3600


@dataclass
class Rank:
    """How a rank ended: its exit code, output, and what it passed to tell()."""

    code: int
    output: str
    told: Any


def free_port() -> int:
    """A port below those that the system gives to connections, which take one that is
    not listened on yet."""
    while True:
        port = secrets.choice(range(10_000, 32_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def torchrun(rank: int, world: int, job: str, port: int = 29500) -> dict[str, str]:
    """The variables that torchrun sets for a rank of a run on one machine."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": job,
    }  # fmt: skip


@contextlib.contextmanager
def started(
    arguments: list[str], environs: list[Mapping[str, str]], **options: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """A Python process for each of environs; none outlives the block."""
    common = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        processes = []
        for environ in environs:
            process = subprocess.Popen(
                [sys.executable, *arguments], env={**common, **environ}, text=True,
                stdout=subprocess.PIPE, **options,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def run(folder: Path, program: str, world: int = 2, **options: Any) -> list[Rank]:
    """Run a module of tests/programs in `world` processes, which find what they are
    in programs.run: rank, world, folder, these options (of JSON), and tell()."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["-m", f"programs.{program}", str(folder), json.dumps(options)]
    job, port = uuid.uuid4().hex, free_port()
    environs = [torchrun(rank, world, job, port) for rank in range(world)]
    with started(
        arguments, environs, cwd=folder, stderr=subprocess.STDOUT
    ) as processes:
        outputs = [
            process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes
        ]
    return [
        Rank(process.returncode, output, _told(folder / f"told{rank}.json"))
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
    ]


def run_alone(
    program: str, *arguments: str, flags: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a module of tests/programs in a process of its own, with these flags of the
    interpreter and these variables."""
    return subprocess.run(
        [sys.executable, *flags, "-m", f"programs.{program}", *arguments],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip


def _told(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def told(ranks: list[Rank]) -> list[Any]:
    """What each rank told; all must have ended well."""
    for number, rank in enumerate(ranks):
        assert rank.code == 0, f"rank {number} ended with {rank.code}:\n{rank.output}"
    return [rank.told for rank in ranks]
