"""Children that a rank forks, and what its group can do after each has ended."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import ctrainer
from ctrainer import _C

LIMIT_SECONDS = 150  # a child that hangs is killed by its alarm; below a group's
CODE = 7


class Rank:
    """A rank with all that stands for its place in a group."""

    def __init__(self, group: _C.Communicator, folder: str) -> None:
        self.group: _C.Communicator | None = group
        self.folder = folder
        self.part = group.split(0)
        self.memory = group.memory(1 << 16)
        np.frombuffer(self.memory, np.uint8)[:] = 17
        self.begun: Any = None

    def check(self) -> None:
        """The group, one split off it and its memory work as before."""
        assert self.group is not None
        assert self.part is not None
        world = self.group.world_size
        if self.begun is not None:
            self.begun[0].wait()
            assert self.begun[1].tolist() == [world] * 1000
            self.begun = None
        for group in (self.group, self.part):
            values = np.ones(1000)
            group.all_reduce(values)
            assert values.tolist() == [world] * 1000
            group.barrier()
        assert (np.frombuffer(self.memory, np.uint8) == 17).all()

    def begin(self) -> None:
        """A collective under way while the child lives."""
        assert self.group is not None
        values = np.ones(1000)
        self.begun = (self.group.all_reduce(values, async_op=True), values)

    def drop(self) -> None:
        """What a garbage collector may do at any moment."""
        self.group = self.part = self.memory = self.begun = None
        gc.collect()


# ---- what a child does; it ends by returning, raising or not at all


def leave(rank: Rank) -> None:
    sys.exit(CODE)


def leave_at_once(rank: Rank) -> None:
    os._exit(CODE)


def collect(rank: Rank) -> None:
    rank.drop()
    sys.exit(CODE)


def collect_and_leave_at_once(rank: Rank) -> None:
    rank.drop()
    os._exit(CODE)


def close(rank: Rank) -> None:
    assert rank.group is not None
    assert rank.part is not None
    rank.begun = None
    rank.part.close()
    rank.group.close()
    sys.exit(CODE)


def fail(rank: Rank) -> None:
    raise OSError("a child's own failure")


def be_killed(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_terminated(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def _owner() -> str:
    return f"belongs to process {os.getppid()}; this is process"


def use(rank: Rank) -> None:
    """Every collective is rejected at once, by a name."""
    group, part = rank.group, rank.part
    assert group is not None
    assert part is not None
    values = np.ones(4)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("all_reduce", lambda: group.all_reduce(values)),
        ("all_reduce", lambda: group.all_reduce(values, async_op=True)),
        ("barrier", part.barrier),
        ("all_gather", lambda: group.gather_bytes(b"x")),
        ("all_gather", lambda: group.split(0)),
    ]
    if rank.memory.is_shared:
        calls.append(("discard", rank.memory.discard))
    for what, call in calls:
        with pytest.raises(RuntimeError, match=f"{what}.* {_owner()}"):
            call()
    assert group.world_size > 1  # what a worker shares its data out by
    sys.exit(CODE)


def train(rank: Rank) -> None:
    """A run of the child's own, alone, whatever its parent is."""
    folder = f"{rank.folder}/run-{os.getpid()}"
    args = ctrainer.TrainingArguments(
        folder, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=3,
        save_steps=3, per_device_train_batch_size=2,
    )  # fmt: skip
    assert args.world_size == 1
    torch.manual_seed(0)
    trainer = ctrainer.Trainer(tiny.Net(), args, train_dataset=tiny.rows(12))
    trainer.train()
    assert trainer.state.global_step == 3
    assert os.path.exists(f"{folder}/checkpoint-3/model.safetensors")
    sys.exit(CODE)


ENDS: dict[Callable[[Rank], None], int] = {
    leave: CODE,
    leave_at_once: CODE,
    collect: CODE,
    collect_and_leave_at_once: CODE,
    close: CODE,
    fail: 1,
    be_killed: -signal.SIGKILL,
    be_terminated: -signal.SIGTERM,
    use: CODE,
    train: CODE,
}


def _wait_for(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _fork(rank: Any, end: Callable[[Any], None]) -> int:
    process = os.fork()
    if process != 0:
        return _wait_for(process)
    signal.alarm(LIMIT_SECONDS)
    end(rank)
    raise AssertionError("the child has not ended")


def _start(rank: Any, end: Callable[[Any], None]) -> int:
    """As multiprocessing starts and ends a child."""
    process = multiprocessing.get_context("fork").Process(target=end, args=(rank,))
    process.start()
    process.join(LIMIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def run(group: _C.Communicator, folder: str, seed: int, n: int) -> list[str]:
    """n children of each rank, drawn alike on all; returns how they were drawn.

    Every end comes once before any comes twice.
    """
    draw = random.Random(seed)
    rank = Rank(group, folder)
    rank.check()
    told = []
    ends: list[Callable[[Rank], None]] = []
    for _ in range(n):
        if not ends:
            ends = draw.sample(list(ENDS), len(ENDS))
        end, how = ends.pop(), draw.choice([_fork, _start])
        under_way = draw.random() < 0.3
        forking = draw.randrange(group.world_size + 1)  # one of them, or all
        if under_way:
            rank.begin()
        if forking in (group.rank, group.world_size):
            code = how(rank, end)
            assert code == ENDS[end], f"{end.__name__} by {how.__name__}: {code}"
        rank.check()
        told.append(f"{end.__name__}{how.__name__}{' under way' * under_way}")
    return told


# ---- children of a rank that trains


class MeddlingRows:
    """Rows whose reader, where it is a worker, closes every group that it finds."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.reader = rows, os.getpid()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.reader:
            for found in gc.get_objects():
                if type(found) is _C.Communicator:
                    found.close()
            gc.collect()
        return self.rows[index]


def training(folder: str, workers: int, persistent: bool, forks: bool) -> list[float]:
    """The parameters after an epoch with saves in the background, in which every rank
    makes a child after each step, if it is to."""
    ends = [leave, fail, leave_at_once, be_terminated, use_trainer]
    # At the end of a child that os.fork() made, multiprocessing itself kills the
    # workers of the parent.
    how = _start if workers else _fork

    class Forking(ctrainer.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if not forks:
                return
            end = ends[state.global_step % len(ends)]
            code = how(trainer, end)
            assert code == ENDS.get(end, CODE), f"{end.__name__}: {code}"

    torch.manual_seed(0)
    args = ctrainer.TrainingArguments(
        folder, use_cpu=True, report_to="none", disable_tqdm=True, num_train_epochs=1,
        save_steps=2, per_device_train_batch_size=2, dataloader_num_workers=workers,
        dataloader_persistent_workers=persistent, ddp_timeout=200, seed=3,
    )  # fmt: skip
    model = tiny.Net()
    rows: Any = MeddlingRows(tiny.rows(20)) if forks else tiny.rows(20)
    trainer = ctrainer.Trainer(model, args, train_dataset=rows, callbacks=[Forking()])
    trainer.train()
    assert trainer.state.global_step == 5
    assert os.path.exists(f"{folder}/checkpoint-5/model.safetensors")
    return [x for p in model.parameters() for x in p.flatten().tolist()]


def use_trainer(trainer: Any) -> None:
    """A child that goes on with the parent's objects is told whose they are."""
    batch = {name: value[None] for name, value in tiny.rows(1)[0].items()}
    with pytest.raises(RuntimeError, match=_owner()):
        trainer.model_wrapped(**batch)["loss"].backward()
    sys.exit(CODE)
