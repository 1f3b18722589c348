"""Runs the scenarios of a module, such as fsdp_scenarios, in ranks that share memory.

A scenario is a function scenario_NAME(group) which raises where it finds something
wrong. The ranks are forks of this process, which has imported torch already: that takes
longer than the scenarios.
"""

from __future__ import annotations

import json
import multiprocessing
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

GROUP_SECONDS = 120.0
LIMIT_SECONDS = 250.0


def found_in(*modules: str) -> dict[str, Any]:
    return {
        name.removeprefix("scenario_"): value
        for module in modules
        for name, value in vars(import_module(module)).items()
        if name.startswith("scenario_")
    }


def outcomes(folder: Path, world: int, *modules: str) -> list[dict[str, str]]:
    """By rank, for each scenario "" or the traceback of what it raised."""
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=run, args=(modules, folder, rank, world), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_SECONDS)
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world, f"the ranks ended with {codes}"
    return [json.loads(_told(folder, rank).read_text()) for rank in range(world)]


def _told(folder: Path, rank: int) -> Path:
    return folder / f"told{rank}.json"


def run(modules: tuple[str, ...], folder: Path, rank: int, world: int) -> None:
    """All scenarios of the modules on this rank; each has a group of its own, so that
    one that fails leaves the others' alone."""
    import torch

    from ctrainer import _C

    found = {}
    for name, scenario in found_in(*modules).items():
        key = f"{folder}/{name}"
        torch.manual_seed(0)  # none depends on what was drawn before it
        group = _C.shared_memory_communicator(key, rank, world, GROUP_SECONDS)
        try:
            scenario(group)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        group.close()
    _told(folder, rank).write_text(json.dumps(found))
