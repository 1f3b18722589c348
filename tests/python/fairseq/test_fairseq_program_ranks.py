"""`fairseq-train` on two workers of this machine."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fairseq_program as program
import pytest
import torch
from places import ROOT

# Three epochs without dropout, whose masks depend on how batches are distributed.
PLAIN = ("--max-epoch", "3", "--dropout", "0", "--attention-dropout", "0")
LAUNCHER = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.preprocess(tmp_path_factory.mktemp("text"))


def run(arguments: list[str]) -> list[Any]:
    """Run the program in processes of its own; what the first worker logged."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    done = subprocess.run(
        [sys.executable, "-m", "ctrainer", *arguments],
        cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(" | ", 3) for line in done.stdout.splitlines()]
    return program.numbers([(line[2], line[3]) for line in lines if len(line) == 4])


def test_two_workers_log_what_one_does_with_twice_the_update_freq(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches are distributed in turns, so an update has the same ones; the last update
    of an epoch has a dummy batch where their number is odd."""
    two = run(
        program.lm_arguments(
            data, tmp_path / "two", "--distributed-world-size", "2", *PLAIN
        )
    )
    one = program.train(
        caplog,
        program.lm_arguments(data, tmp_path / "one", "--update-freq", "2", *PLAIN),
    )
    assert [name for name, _ in two] == [name for name, _ in one]
    assert len(two) > 8
    for (_, ours), (_, theirs) in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            # 3 digits are logged, and gradients are added in another order
            assert float(ours[key]) == pytest.approx(float(value), rel=2e-3, abs=2e-3)
    saved = sorted(p.name for p in (tmp_path / "two").iterdir())
    assert saved == sorted(p.name for p in (tmp_path / "one").iterdir())


# What workers that train apart may be asked for, beside blocks of 5 after 3 updates.
BLOCKS = (
    (),
    ("--use-nbm",),
    ("--average-sync",),
    ("--block-momentum", "0"),
    ("--delta-bits", "8"),
    ("--warmup-iterations", "20"),  # no block has ended yet
)
PRECISIONS = ((), ("--fp16",), ("--amp",), ("--bf16",))
AVERAGES = ((), ("--store-ema", "--ema-decay", "0.9"))
SYNC = ("--use-bmuf", "--global-sync-iter", "5", "--block-lr", "0.7")


# Averages after every third update; a momentum of them is saved, but not used within
# 13 updates (tests/python/fairseq/test_fairseq_ranks.py has it).
LOCAL = ("--ddp-backend", "slowmo", "--localsgd-frequency", "3")
MOMENTA = ((), ("--slowmo-momentum", "0.5"))


def _drawn(axes: tuple[tuple[tuple[str, ...], ...], ...], seed: int) -> list[str]:
    generator = random.Random(seed)
    chosen = [generator.choice(axis) for axis in axes]
    workers = str(generator.choice((2, 2, 3, 4)))
    options = ["--distributed-world-size", workers, "--dropout", "0.1"]
    return [*options, *(option for group in chosen for option in group)]


def _blocks_drawn(seed: int) -> list[str]:
    drawn = _drawn((BLOCKS, PRECISIONS, AVERAGES), seed)
    return [*drawn[:2], *SYNC, "--warmup-iterations", "3", *drawn[2:]]


def _differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """The places at which two nested states differ by a bit; clocks apart."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours.keys() - {"metrics", "previous_training_time", "cfg"}:
            yield from _differences(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(*pair, f"{where}.{i}")
    elif isinstance(ours, torch.Tensor):
        if not torch.equal(ours, theirs):
            yield where
    elif ours != theirs:
        yield where


@pytest.mark.exhaustive  # three runs of several processes: 20 s and more
@pytest.mark.parametrize("seed", range(6))
def test_workers_go_on_within_a_block_to_the_bit(
    data: Path, tmp_path: Path, seed: int
) -> None:
    """Stopped at the 7th update of blocks that end at the 5th and 10th, and run to the
    13th, which is within one too: the file, with every worker's state, is that of a run
    that was not stopped."""
    _compare_with_whole(data, tmp_path, _blocks_drawn(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_workers_of_slowmo_go_on_between_averages_to_the_bit(
    data: Path, tmp_path: Path, seed: int
) -> None:
    drawn = _drawn((PRECISIONS, AVERAGES, MOMENTA), seed)
    _compare_with_whole(data, tmp_path, [*drawn[:2], *LOCAL, *drawn[2:]])


def _compare_with_whole(data: Path, tmp_path: Path, drawn: list[str]) -> None:
    def until(update: int, folder: str) -> Any:
        limits = ["--max-update", str(update), "--max-epoch", "9"]
        more = ["--disable-validation", "--no-epoch-checkpoints", *limits]
        run(program.lm_arguments(data, tmp_path / folder, *drawn, *more))
        return torch.load(tmp_path / folder / "checkpoint_last.pt")

    whole, _ = until(13, "whole"), until(7, "halves")
    resumed = until(13, "halves")
    for state in (whole, resumed):
        state["optimizer_history"] = state["optimizer_history"][-1]
    assert list(_differences(resumed, whole)) == [], drawn
    states = whole["extra_state"]["workers"]
    assert len(states) == int(drawn[1])
    for own in states[1:]:
        assert list(_differences(own["model"], whole["model"]))
