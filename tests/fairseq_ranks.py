"""Runs code as the ranks of a gloo group: subprocesses with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 120

PROLOGUE = """
import json, os, sys
import torch
import torch.distributed as dist
from datetime import timedelta
import fairseq_tiny as tiny

rank, world = int(sys.argv[1]), int(sys.argv[2])
folder = sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
    timeout=timedelta(seconds=float(sys.argv[4])),
)

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


def run_ranks(
    folder: Path, body: str, world: int = 2, timeout_seconds: float = 60.0
) -> list[Rank]:
    """Run `body` in `world` processes that have joined a gloo group.

    It sees rank, world, folder, torch, dist, tiny (tests/fairseq_tiny.py) and
    tell(value), which hands a JSON value back. timeout_seconds: of its collectives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "rank.py"
    script.write_text(PROLOGUE + textwrap.dedent(body))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(world):
            process = subprocess.Popen(
                [sys.executable, str(script), str(rank), str(world), str(folder),
                 str(timeout_seconds)],
                env=environment, cwd=folder, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in started]
    return [
        Rank(process.returncode, output, _told(folder / f"told{rank}.json"))
        for rank, (process, output) in enumerate(zip(started, outputs, strict=True))
    ]


def _told(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def told(ranks: list[Rank]) -> list[Any]:
    """What each rank told; all must have ended well."""
    for number, rank in enumerate(ranks):
        assert rank.code == 0, f"rank {number} ended with {rank.code}:\n{rank.output}"
    return [rank.told for rank in ranks]
