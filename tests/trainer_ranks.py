"""Runs code as the ranks of a run, as torchrun would start them on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 120

PROLOGUE = """
import json, os, sys
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = sys.argv[1]

def tell(value):
    with open(f"{folder}/told{rank}.json", "w") as file:
        json.dump(value, file)
"""


@dataclass
class Rank:
    """How a rank ended: its exit code, output, and what it passed to tell()."""

    code: int
    output: str
    told: Any


def launch(script: Path, folder: Path, world: int, port: int) -> list[Rank]:
    job = uuid.uuid4().hex
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(world):
            environment = {
                **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": job,
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, str(script), str(folder)], env=environment,
                cwd=folder, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in started]
    return [
        Rank(process.returncode, output, _told(folder / f"told{rank}.json"))
        for rank, (process, output) in enumerate(zip(started, outputs, strict=True))
    ]


def run_ranks(folder: Path, body: str, world: int = 2, port: int = 29500) -> list[Rank]:
    """Run `body` in `world` processes; it sees rank, world, folder and tell(value),
    which hands a JSON value back. port: for torch.distributed, where it is used."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "rank.py"
    script.write_text(PROLOGUE + textwrap.dedent(body))
    return launch(script, folder, world, port)


def _told(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def told(ranks: list[Rank]) -> list[Any]:
    """What each rank told; all must have ended well."""
    for number, rank in enumerate(ranks):
        assert rank.code == 0, f"rank {number} ended with {rank.code}:\n{rank.output}"
    return [rank.told for rank in ranks]
