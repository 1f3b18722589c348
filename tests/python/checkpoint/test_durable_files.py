"""What takes its place by a rename is on the disk before, and its name after: what a
loss of power leaves is the old file or the new one, and whoever was told that it is
saved finds it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from durable_scenarios import SCENARIOS
from places import SUPPORT


@pytest.fixture(scope="module")
def tracer(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = str(tmp_path_factory.mktemp("tracer") / "disk_trace.so")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ("-shared", "-fPIC", "-o", library, str(SUPPORT / "disk_trace.c"), "-ldl")
    subprocess.run([*compiler, *flags], check=True)
    return library


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def not_durable(path: str, trace: list[list[str]]) -> list[str]:
    """What a loss of power could take of the file: followed from its last name back to
    its first, it is synced under one that a rename takes away."""
    faults = []
    name, later, renamed = path, set[str](), False  # later: synced under this name
    for what, source, target in reversed(trace):
        if what == "sync":
            if source == name and renamed:
                return faults
            later.add(source)
        elif what == "rename" and is_below(name, target):
            if os.path.dirname(target) not in later:
                faults.append(f"{target} is a name that is not on the disk")
            name, later, renamed = source + name[len(target) :], set(), True
        elif is_below(name, source):
            break  # an earlier file of that name
    return [*faults, f"{path} was renamed before it was synced"] if renamed else faults


def mixed_up(trace: list[list[str]]) -> list[str]:
    """Names that were given up before others of their folder changed, and then came
    back: a loss of power may not leave the earlier file among the others' new ones."""
    faults, given_up = [], set[str]()
    back = [target for what, _, target in trace if what == "rename"]
    for what, source, target in trace:
        if what == "unlink" and source in back:
            given_up.add(source)
        elif what == "sync":
            given_up = {path for path in given_up if os.path.dirname(path) != source}
        elif what == "rename":
            folder = os.path.dirname(target)
            late = [path for path in given_up if os.path.dirname(path) == folder]
            faults += [f"{path} may outlive the change of {target}" for path in late]
    return faults


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_saved_outlives_a_loss_of_power(
    name: str, tracer: str, tmp_path: Path
) -> None:
    folder, log = tmp_path / "files", tmp_path / "trace"
    folder.mkdir()
    script = str(SUPPORT / "durable_scenarios.py")
    traced = {"LD_PRELOAD": tracer, "CT_DISK_TRACE": str(log)}
    subprocess.run(
        [sys.executable, script, name, str(folder)],
        env={**os.environ, **traced}, check=True,
    )  # fmt: skip
    trace = [line.split("\t") for line in log.read_text().splitlines()]
    files = [str(path) for path in folder.rglob("*") if path.is_file()]
    assert {"sync", "rename"} <= {what for what, *_ in trace}
    assert len(files) > 1
    assert [fault for path in files for fault in not_durable(path, trace)] == []
    if name == "indexed_data":  # the others' files mean something by themselves
        assert mixed_up(trace) == []
