"""Runs modules of tests/programs: as ranks that torchrun would start here, or alone."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
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


def run(
    folder: Path, program: str, world: int = 2, apart: bool = False, **options: Any
) -> list[Rank]:
    """Run a module of tests/programs in `world` processes, which find what they are
    in programs.run: rank, world, folder, these options (of JSON), and tell(). Other
    programs may have imported modules before; apart: none has."""
    folder.mkdir(parents=True, exist_ok=True)
    job, port = uuid.uuid4().hex, free_port()
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    environ.pop("PYTEST_CURRENT_TEST", None)
    forking = _Forking(environ) if apart else _forking(frozenset(environ.items()))
    codes = forking.run(
        f"programs.{program}",
        [
            {
                "arguments": [str(folder), json.dumps(options)],
                "environ": {**environ, **torchrun(rank, world, job, port)},
                "folder": str(folder),
                "output": str(folder / f"output{rank}.txt"),
            }
            for rank in range(world)
        ],
    )
    return [
        Rank(
            code,
            (folder / f"output{rank}.txt").read_text(),
            _told(folder / f"told{rank}.json"),
        )
        for rank, code in enumerate(codes)
    ]


class _Forking:
    """Two processes of programs.forked, of which ranks are forked: two, for each hashes
    strings in its own way, and the order of sets may not be that of all ranks."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "programs.forked"], env=environ, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for _ in range(2)
        ]  # fmt: skip

    def run(self, program: str, ranks: list[dict[str, Any]]) -> list[int]:
        """The exit codes of these ranks, which no exception of ours outlives."""
        codes = [0] * len(ranks)
        try:
            for which, process in enumerate(self.processes):
                request = {"program": program, "seconds": LIMIT_SECONDS}
                assert process.stdin is not None
                print(json.dumps({**request, "ranks": ranks[which::2]}),
                      file=process.stdin, flush=True)  # fmt: skip
            for which, process in enumerate(self.processes):
                assert process.stdout is not None
                codes[which::2] = json.loads(process.stdout.readline())
        except BaseException:
            for process in self.processes:
                process.send_signal(signal.SIGALRM)
            _forking.cache_clear()
            raise
        return codes

    def __del__(self) -> None:
        for process in self.processes:
            process.communicate()


@functools.lru_cache(maxsize=2)
def _forking(environ: frozenset[tuple[str, str]]) -> _Forking:
    return _Forking(dict(environ))


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
