"""Starts a benchmark's own program as the ranks of a job on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid

COMMAND = [sys.executable, "-W", "ignore", *sys.argv]


def job(ranks: int, **more: str) -> dict[str, str]:
    """The environment of a job but for each rank's number, with one thread a rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            "CTRAINER_NUM_THREADS": "1", **more}  # fmt: skip


def start(ranks: int, *options: str, **more: str) -> int:
    """Run the program once for each RANK; the largest of their exit codes.

    options: of the program, after its own.
    """
    environment = job(ranks, **more)
    command = [*COMMAND, *options]
    started = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    return max(rank.wait() for rank in started)
