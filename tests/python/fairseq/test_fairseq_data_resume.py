"""fairseq's iterators go on in the middle of an epoch with the batches that follow,
also where rows and collators draw random numbers, in workers or not."""

from __future__ import annotations

import gc
import json
import multiprocessing
from typing import Any

import pytest
import torch
from data_kinds import BATCH, Mapped, N, Sized, Stateful, collate
from draws import draws

from ctrainer.fairseq.iterators import (
    EpochBatchIterator,
    StreamingEpochBatchIterator,
)


class SizedStateful(Stateful):
    def __len__(self) -> int:
        return N


KINDS: dict[str, Any] = {
    "map-style": Mapped, "stream": Sized, "stream with a state": SizedStateful,
}  # fmt: skip
BATCHES = [list(range(i, min(i + BATCH, N))) for i in range(0, N, BATCH)]


def epochs_of(kind: str, workers: int, persistent: bool, **options: Any) -> Any:
    given = {"num_workers": workers, **options}
    dataset = KINDS[kind]()
    if kind == "map-style":
        return EpochBatchIterator(dataset, collate, BATCHES, **given)
    given["persistent_workers"] = persistent
    return StreamingEpochBatchIterator(dataset, BATCH, collate, **given)


def read(epochs: Any, epoch: int) -> list[bytes]:
    """The rest of the epoch under way, or the next, and all up to this one."""
    found = []
    while epochs.next_epoch_idx <= epoch:
        torch.rand(3)  # the model draws, too
        found += [b["x"].numpy().tobytes() for b in epochs.next_epoch_itr()]
    return found


def states(epochs: Any, last: int) -> list[dict[str, Any]]:
    """What a checkpoint would hold after each batch of epochs 1 to `last`."""
    found = []
    while epochs.next_epoch_idx <= last:
        found += [
            json.loads(json.dumps(epochs.state_dict())) for _ in epochs.next_epoch_itr()
        ]
    return found


@pytest.mark.parametrize(
    ("workers", "persistent", "buffer_size"),
    [(0, False, 3), (2, False, 0), (2, True, 3)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_is_found_again(
    kind: str, workers: int, persistent: bool, buffer_size: int
) -> None:
    options = {"buffer_size": buffer_size}
    whole = read(epochs_of(kind, workers, persistent, **options), 2)
    saved = states(epochs_of(kind, workers, persistent, **options), 2)
    assert len(saved) == len(whole)
    places = [*range(len(saved))]
    for at in places[1 :: len(places) // draws(2, len(places))]:
        torch.manual_seed(at)
        again = epochs_of(kind, workers, persistent, **options)
        again.load_state_dict(saved[at])
        assert read(again, 2) == whole[at + 1 :], at


def test_any_number_of_workers_draws_alike() -> None:
    whole = read(epochs_of("map-style", 0, False), 2)
    for workers, persistent in [(1, True), (3, False)]:
        assert read(epochs_of("map-style", workers, persistent), 2) == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer_size", [0, 3])
def test_workers_end_with_the_iterator_and_not_in_a_collection(
    kind: str, buffer_size: int
) -> None:
    epochs = epochs_of(kind, 1, True, buffer_size=buffer_size)
    gc.disable()
    try:
        for _ in range(2):
            assert len(list(epochs.next_epoch_itr())) == len(BATCHES)
        del epochs
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()
