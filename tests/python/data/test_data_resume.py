"""A run resumed at any step has the batches, and so the losses, of one that was not
interrupted: bit for bit, for every kind of data and any number of workers."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_kinds
import numpy as np
import pytest
import torch
from data_kinds import (
    BATCH,
    DATA,
    LOADERS,
    Mapped,
    N,
    Stateful,
    Stream,
    collate,
    loader_of,
    row,
    stack,
)
from draws import EXHAUSTIVE, draws
from places import PYTHONPATH
from tiny import Net, arguments
from torch.utils.data import DataLoader, Dataset, RandomSampler

import ctrainer
from ctrainer.adapters import generators, reading
from ctrainer.adapters import torch as torch_adapter

WORKERS = [(0, False), (2, False), (2, True)]
STEPS = 14  # of 6 batches an epoch


class Given(ctrainer.Trainer):
    """Trains on a loader of the user's own, where it has one."""

    own_loader: Any = None

    def get_train_dataloader(self) -> Any:
        own = self.own_loader
        return super().get_train_dataloader() if own is None else own


def make(
    folder: Path, kind: str, workers: int, persistent: bool, **options: Any
) -> Given:
    name, data = LOADERS.get(kind, ("", DATA.get(kind)))
    assert data is not None
    dataset = data()
    given = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "seed": 11,
        **options,
    }  # fmt: skip
    args = arguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH,
        remove_unused_columns=False, dataloader_num_workers=workers,
        dataloader_persistent_workers=persistent, **given,
    )  # fmt: skip
    collator = stack if "rarely" in kind else collate
    trainer = Given(Net(dropout=0.2), args, collator, dataset)
    trainer.remove_callback(ctrainer.PrinterCallback)
    if name:
        trainer.own_loader = loader_of(name, dataset, workers, persistent)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [e["loss"] for e in trainer.state.log_history if "loss" in e]


def weights(trainer: Any) -> bytes:
    parameters = trainer.model.state_dict().values()
    return b"".join(p.cpu().numpy().tobytes() for p in parameters)


def generator_states() -> tuple[Any, ...]:
    numpy = pickle.dumps(np.random.get_state(legacy=False))
    return random.getstate(), numpy, torch.get_rng_state().numpy().tobytes()


def check(folder: Path, steps: Any, **given: Any) -> Any:
    """Train, then resume from each of these steps, and compare."""
    whole = make(folder / "whole", **given)
    whole.train()
    assert len(losses(whole)) == STEPS
    for step in steps:
        torch.manual_seed(step)
        resumed = make(folder / "again", **{**given, "save_strategy": "no"})
        resumed.train(str(folder / "whole" / f"checkpoint-{step}"))
        assert losses(resumed) == losses(whole), step
        assert weights(resumed) == weights(whole), step
    return whole


CASES = [
    (kind, workers, persistent)
    for number, kind in enumerate([*DATA, *LOADERS])
    for at, (workers, persistent) in enumerate(WORKERS)
    if kind != "object" or workers == 0
    if EXHAUSTIVE or kind in ("map-style", "object") or at == number % 3
]


@pytest.mark.parametrize(("kind", "workers", "persistent"), CASES)
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    tmp_path: Path, kind: str, workers: int, persistent: bool
) -> None:
    some = draws(2 if workers == 0 else 1, STEPS - 1)
    steps = [*range(1, STEPS)][:: (STEPS - 1) // some][:some]
    if some < STEPS - 1:
        steps = [3 + sum(map(ord, kind)) % 3, 9][:some]
        steps += [6] if kind in LOADERS else []  # the end of an epoch
    check(tmp_path, steps, kind=kind, workers=workers, persistent=persistent)


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map-style", "stream"])
def test_another_seed_changes_nothing_of_a_run_that_resumes(
    tmp_path: Path, kind: str, workers: int, seedable: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    given: Any = {
        "kind": kind, "workers": workers, "persistent": False,
        "accelerator_config": {"use_seedable_sampler": seedable},
    }  # fmt: skip
    whole = make(tmp_path / "whole", **given)
    whole.train()
    for step in (3, 6, 8):  # 6: the end of an epoch
        again = make(tmp_path / f"{step}", **given, seed=12)
        again.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert losses(again) == losses(whole), step
        assert "took seed 11 for its data, and the" in caplog.text
    twice = make(tmp_path / "twice", **given, data_seed=4)
    twice.train(str(tmp_path / "8" / "checkpoint-12"))
    assert losses(twice) == losses(whole)
    anew = make(tmp_path / "anew", **given, seed=12, ignore_data_skip=True)
    anew.train(str(tmp_path / "whole" / "checkpoint-6"))
    assert losses(anew)[:6] == losses(whole)[:6]
    assert losses(anew)[6:] != losses(whole)[6:]


def test_rows_of_unequal_length_grouped_by_it(tmp_path: Path) -> None:
    check(
        tmp_path, [2, 9], kind="map-style", workers=0, persistent=False,
        train_sampling_strategy="group_by_length",
    )  # fmt: skip


def test_any_number_of_workers_draws_alike(tmp_path: Path) -> None:
    whole = make(tmp_path / "a", "map-style", 0, False)
    whole.train()
    for workers, persistent in [(1, False), (3, True)]:
        other = make(tmp_path / "b", "map-style", workers, persistent)
        other.train()
        assert losses(other) == losses(whole)
        assert weights(other) == weights(whole)
    again = make(tmp_path / "b", "map-style", 2, True)
    again.train(str(tmp_path / "a" / "checkpoint-8"))
    assert losses(again) == losses(whole)


def test_torchs_way_is_an_option(tmp_path: Path) -> None:
    own = {"dataloader_seed_by_place": False, "max_steps": 3}
    torchs = make(tmp_path / "a", "map-style", 0, False, **own)
    torchs.train()
    by_place = make(tmp_path / "b", "map-style", 0, False, max_steps=3)
    by_place.train()
    assert losses(torchs) != losses(by_place)
    again = make(tmp_path / "c", "map-style", 0, False, **own)
    again.train(str(tmp_path / "a" / "checkpoint-2"))
    assert losses(again) == losses(torchs)


@pytest.mark.parametrize(("saved", "now"), [(2, 0), (0, 2)])
def test_a_stream_is_rejected_to_other_workers(
    tmp_path: Path, saved: int, now: int
) -> None:
    make(tmp_path, "stream", saved, False, max_steps=2).train()
    other = make(tmp_path, "stream", now, False)
    with pytest.raises(ValueError, match=f"dataloader_num_workers={saved};"):
        other.train(str(tmp_path / "checkpoint-2"))
    anew = make(tmp_path, "stream", now, False, max_steps=3, ignore_data_skip=True)
    assert anew.train(str(tmp_path / "checkpoint-2")).global_step == 3


def test_one_worker_and_none_read_a_stream_alike(tmp_path: Path) -> None:
    whole = make(tmp_path / "a", "stream with a state", 0, False)
    whole.train()
    again = make(tmp_path / "b", "stream with a state", 1, False)
    again.train(str(tmp_path / "a" / "checkpoint-9"))
    assert losses(again) == losses(whole)


class Forgetful(Stream):
    """Gives other rows each time."""

    made = 0

    def order(self) -> list[int]:
        Forgetful.made += 1
        return super().order()[Forgetful.made :]


class Unsteady(RandomSampler):
    """An order that follows from how many there were in this process."""

    made = 0

    def __iter__(self) -> Iterator[int]:
        Unsteady.made += 1
        return iter([(7 * i + Unsteady.made) % N for i in range(N)])


def test_other_data_than_before_is_rejected(tmp_path: Path) -> None:
    def trainer() -> Given:
        made = make(tmp_path, "stream", 0, False, max_steps=3)
        made.train_dataset = Forgetful()
        return made

    trainer().train()
    with pytest.raises(ValueError, match=r"batch 2 of epoch 0 is not.*Forgetful gives"):
        trainer().train(str(tmp_path / "checkpoint-2"))


def test_another_order_than_before_is_rejected(tmp_path: Path) -> None:
    def trainer() -> Given:
        made = make(tmp_path, "map-style", 0, False, max_steps=3)
        made.own_loader = DataLoader(
            Mapped(), BATCH, sampler=Unsteady(Mapped()), collate_fn=collate
        )
        return made

    trainer().train()
    with pytest.raises(ValueError, match=r"batch 2 of epoch 0 has not.*Unsteady gives"):
        trainer().train(str(tmp_path / "checkpoint-2"))


class Opaque(Stateful):
    """A state that no file of numbers can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "lock": object()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_cannot_be_saved_is_read_past(
    tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def trainer(folder: str) -> Given:
        made = make(tmp_path / folder, "stream", workers, False, max_steps=4)
        made.train_dataset = Opaque()
        return made

    whole, again = trainer("a"), trainer("b")
    whole.train()
    assert "state of Opaque cannot be saved (a object is no plain data)" in caplog.text
    again.train(str(tmp_path / "a" / "checkpoint-3"))
    assert losses(again) == losses(whole)


def test_what_has_a_state_is_not_read_again(tmp_path: Path) -> None:
    make(tmp_path, "stream with a state", 0, False, max_steps=5).train()
    Stateful.made = 0
    make(tmp_path, "stream with a state", 0, False, max_steps=6).train(
        str(tmp_path / "checkpoint-5")
    )
    assert Stateful.made <= 2 * BATCH


def test_reading_past_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, "stream", 0, False, max_steps=3).train()
    monkeypatch.setattr(reading, "SECONDS_BETWEEN_LINES", 0.0)
    make(tmp_path, "stream", 0, False, max_steps=4).train(
        str(tmp_path / "checkpoint-3")
    )
    assert "read past 2 of 3 batches that the run has seen" in caplog.text


ALL = set(range(1, 100))
DRAWS = [
    (set(), set()),
    ({0} | ALL, ALL),
    (ALL, ALL),
    ({*range(5, 40)}, {*range(8, 40)}),
    ({64, 70, 80}, {64, 70}),
    ({0, 1, 50}, {1, 50}),
    ({3, 5, 33}, set()),
]


@pytest.mark.parametrize(("drawing", "by_place"), DRAWS)
def test_batches_of_an_epoch_that_draws_are_drawn_by_their_place(
    drawing: set[int], by_place: set[int]
) -> None:
    """Of a loader of which nothing is known; its first batch draws as it comes."""
    kinds = [lambda: float(torch.rand(())), np.random.rand, random.random]

    def batches() -> Iterator[float]:
        for at in range(100):
            yield kinds[at % 3]() if at in drawing else 0.0

    found = []
    for seed in (1, 2):
        ctrainer.set_seed(seed)
        state = generator_states()
        read = torch_adapter.reader(batches(), 3)
        found.append(list(read.start(0, 0, None)))
        assert (generator_states() == state) == (drawing == by_place)
    same = {at for at in drawing if found[0][at] == found[1][at]}
    assert same == by_place


@pytest.mark.parametrize("numpy", [True, False])
def test_generators_that_keep_their_state_elsewhere_are_put_back(numpy: bool) -> None:
    if numpy:
        np.random.set_bit_generator(np.random.Philox(3))
    else:
        monkey = pytest.MonkeyPatch()
        monkey.setattr(generators, "_words_at", lambda address, expected: None)
    try:
        test_a_batch_leaves_the_runs_generators_alone()
    finally:
        if numpy:
            np.random.set_bit_generator(np.random.MT19937(3))
        else:
            monkey.undo()


def test_a_batch_leaves_the_runs_generators_alone() -> None:
    read = torch_adapter.reader(DataLoader(Mapped(), BATCH, collate_fn=collate), 3)
    read.start(0, 0, None)
    for before in ((), (np.random.randn,), (random.random, np.random.rand)):
        for draw in before:
            draw()
        state = generator_states()
        next(read)
        assert generator_states() == state


def test_a_broken_row_gives_the_generators_back() -> None:
    class Broken(Mapped):
        def __getitem__(self, i: int) -> Any:
            raise KeyError(row(i))

    read = torch_adapter.reader(DataLoader(Broken(), BATCH), 3).start(0, 0, None)
    state = generator_states()
    with pytest.raises(KeyError):
        next(read)
    assert generator_states() == state


@pytest.mark.parametrize("kind", [Mapped, Stream, Stateful])
def test_workers_end_with_the_reader_and_not_in_a_collection(kind: Any) -> None:
    loader = DataLoader(
        kind(), BATCH, collate_fn=collate, num_workers=1, persistent_workers=True
    )
    read = torch_adapter.reader(loader, 3)
    gc.disable()
    try:
        for epoch, taken in ((0, N), (1, 2)):
            read.start(epoch, 0, None)
            assert len(list(itertools.islice(read, taken))) >= 2
        del loader, read
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_the_place_in_a_large_data_set_is_found_without_its_rows() -> None:
    class Large(Dataset[int]):
        def __len__(self) -> int:
            return 10**8

        def __getitem__(self, i: int) -> int:
            return i

    loader = DataLoader(Large(), 100, shuffle=False)
    started = time.process_time()
    found = next(torch_adapter.reader(loader, 3).start(0, 999_000, None))
    assert found[0] == 99_900_000
    assert time.process_time() - started < 1.0


def slow() -> None:
    """Let rows take their time."""
    made = data_kinds.row

    def row_in_time(i: int) -> Any:
        time.sleep(0.02)
        return made(i)

    data_kinds.row = row_in_time


def test_a_killed_stream_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    paths = os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, "-m", "programs.data.killed_stream", str(folder)],
        env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint-8").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    whole = make(tmp_path / "whole", "stream with a state", 2, False)
    whole.train()
    resumed = make(folder, "stream with a state", 2, False)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    assert weights(resumed) == weights(whole)
