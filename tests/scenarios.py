"""Runs the scenarios of a module, such as fsdp_scenarios, in ranks that share memory.

A scenario is a function scenario_NAME(group) which raises where it finds something
wrong. One set of processes runs those of several modules: importing torch takes the
longest.
"""

from __future__ import annotations

import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from ranks import run_ranks, told

GROUP_SECONDS = 30.0

BODY = """
import scenarios
tell(scenarios.run(MODULES, folder, rank, world))
"""


def found_in(*modules: str) -> dict[str, Any]:
    return {
        name.removeprefix("scenario_"): value
        for module in modules
        for name, value in vars(import_module(module)).items()
        if name.startswith("scenario_")
    }


def outcomes(folder: Path, world: int, *modules: str) -> list[dict[str, str]]:
    """By rank, for each scenario "" or the traceback of what it raised."""
    return told(run_ranks(folder, BODY.replace("MODULES", repr(modules)), world))


def run(modules: tuple[str, ...], folder: str, rank: int, world: int) -> dict[str, str]:
    """All scenarios of the modules on this rank; each has a group of its own, so that
    one that fails leaves the others' alone."""
    from ctrainer import _C

    found = {}
    for name, scenario in found_in(*modules).items():
        key = f"{folder}/{name}"
        group = _C.shared_memory_communicator(key, rank, world, GROUP_SECONDS)
        try:
            scenario(group)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        group.close()
    return found
