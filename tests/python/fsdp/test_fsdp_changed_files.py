"""Shards that another process changes while they are put together: what is made of them
is what was checked, or an error names the file and leaves earlier results alone."""

from __future__ import annotations

import copy
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import draws
from fsdp_shards import nested_job, save

import ctrainer
from ctrainer.checkpoint import files
from ctrainer.fsdp import consolidate as command
from ctrainer.fsdp.shard_files import load_shard, save_shard

CTRAINER = str(Path(ctrainer.__file__).parent)
BEGUN = files.unchanged.__wrapped__.__code__


class Interruption:
    """Calls `change` at step number `at` of the package's, counted from where files
    were first noted; at 0 never. A step is a call of one of its functions, or by them
    of one in C."""

    def __init__(self, at: int, change: Callable[[], None]) -> None:
        self.at, self.change = at, change
        self.steps, self.begun = 0, False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if not frame.f_code.co_filename.startswith(CTRAINER):
            return
        if not self.begun:
            self.begun = frame.f_code is BEGUN and event == "return"
        elif event in ("call", "c_call"):
            self.steps += 1
            if self.steps == self.at:
                sys.setprofile(None)
                self.change()
                sys.setprofile(self)

    def __enter__(self) -> Interruption:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    with path.open("r+b") as file:
        file.write(data)


def flip_in_secret(path: Path, chance: random.Random) -> None:
    found = path.stat()
    flip(path, chance)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def cut(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size))


def grow(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * chance.randrange(1, 99))


def replace(path: Path, chance: random.Random) -> None:
    """By a whole one of another save."""
    shutil.copy(path.parent.with_name("others") / path.name, f"{path}.new")
    os.replace(f"{path}.new", path)


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


CHANGES = [flip, flip_in_secret, cut, grow, replace, delete]


def make_shards(folder: Path, ending: str, value: int) -> None:
    folder.mkdir()
    job = nested_job(2)
    for unit in job.units:
        unit.parameters = {n: p + value for n, p in unit.parameters.items()}
    save(job, folder, adam=True)
    if ending == "safetensors":
        for path in folder.glob("*.pth"):
            save_shard(load_shard(path), path.with_suffix(".safetensors"))
            path.unlink()


def consolidate(folder: Path, ending: str, result: Path) -> Any:
    return command.consolidate_sharded_model_checkpoints(
        str(folder / "ckpt"), f"-*.{ending}", str(result / f"x.{ending}"),
        save_optimizer=True,
    )[0]  # fmt: skip


def read(folder: Path, ending: str, result: Path) -> Any:
    return command.consolidate_sharded_model_checkpoints(
        str(folder / "ckpt"), f"-*.{ending}", save_model=False
    )[0]


def reshard(folder: Path, ending: str, result: Path) -> Any:
    command.reshard_checkpoints(
        str(folder / "ckpt"), f"-*.{ending}", world_size=3, save_prefix=f"{result}/x"
    )


def same(found: Any, expected: Any) -> bool:
    if expected is None:
        return found is None
    return found.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in found.items()
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize("work", [consolidate, read, reshard])
def test_shards_that_change_meanwhile_are_named_or_not_used(
    tmp_path: Path, work: Any, ending: str
) -> None:
    made, others, result = (tmp_path / name for name in ("made", "others", "result"))
    make_shards(made, ending, 0)
    make_shards(others, ending, 1)
    result.mkdir()
    with Interruption(0, lambda: None) as whole:
        expected = copy.deepcopy(work(made, ending, result))
    expected_files = contents(result)
    names = [path.name for path in made.iterdir()]
    counts = {"named": 0, "not used": 0}
    for seed in range(draws(24, 500)):
        chance = random.Random(seed)
        folder = tmp_path / f"shards{seed}"
        shutil.copytree(made, folder)
        before = {name: b"earlier" for name in expected_files}
        for name, data in before.items():
            (result / name).write_bytes(data)
        path, change = folder / chance.choice(names), CHANGES[seed % len(CHANGES)]
        at = chance.randrange(1, whole.steps + 1)
        told = f"seed {seed}: {change.__name__} of {path.name} at step {at}"
        found, error = None, ""
        try:
            with Interruption(at, lambda p=path, c=change, r=chance: c(p, r)):
                found = work(folder, ending, result)
        except (ValueError, OSError, AssertionError) as raised:
            error = str(raised)
        if error:
            assert str(path) in error, told
            assert contents(result) == before, told
        else:
            assert contents(result) == expected_files, told
            assert same(found, expected), told
        counts["named" if error else "not used"] += 1
        shutil.rmtree(folder)
    assert counts["named"] > counts["not used"]
    print(counts)
