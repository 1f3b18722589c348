"""Runs the scenarios of a module, such as fsdp_scenarios, as the ranks of groups in
shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 150
GROUP_SECONDS = 30.0


def scenarios(module: str = "fsdp_scenarios") -> dict[str, Any]:
    found = vars(import_module(module))
    names = [name for name in found if name.startswith("scenario_")]
    return {name.removeprefix("scenario_"): found[name] for name in names}


def outcomes(
    folder: Path, world: int, module: str = "fsdp_scenarios"
) -> list[dict[str, str]]:
    """By rank, for each scenario "" or the traceback of what it raised."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(world):
            process = subprocess.Popen(
                [sys.executable, __file__, str(rank), str(world), str(folder), module],
                env=environment, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.wait(LIMIT_SECONDS) == 0
    told = [folder / f"told{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text()) for path in told]


def main(rank: int, world: int, folder: Path, module: str) -> None:
    from ctrainer import _C

    told = {}
    for name, scenario in scenarios(module).items():
        # A group for each: one that fails leaves the others' alone.
        key = f"{folder}/{name}"
        group = _C.shared_memory_communicator(key, rank, world, GROUP_SECONDS)
        try:
            scenario(group)
            told[name] = ""
        except BaseException:
            told[name] = traceback.format_exc()
        group.close()
    (folder / f"told{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
