"""Batches that rank 0 reads and distributes: dispatch_batches of accelerator_config."""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from draws import draws
from rank_threads import on_ranks
from torch.utils.data import DataLoader, IterableDataset

from ctrainer import _C
from ctrainer.adapters import _torch_rank_eval
from ctrainer.adapters._torch_ranks import DispatchedLoader
from ctrainer.arguments.accelerator import BatchPlan

Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Where each thread, a rank, puts the group that is its world."""
    mine = threading.local()
    monkeypatch.setattr(_torch_rank_eval, "world", lambda: mine.group)
    return mine


def plan(group: _C.Communicator) -> BatchPlan:
    return BatchPlan(group.rank, group.world_size, False, True, True, True)


def loading(data: Any, **options: Any) -> DataLoader[Any]:
    """One that draws its workers' seed from no global generator."""
    return DataLoader(data, generator=torch.Generator(), **options)


def pairs(rows: list[tuple[int, int]]) -> Pair:
    return Pair(*map(torch.tensor, zip(*rows, strict=True)))


def test_rows_are_distributed_in_the_batches_own_containers(groups: Any) -> None:
    def read(group: _C.Communicator) -> list[Any]:
        groups.group = group
        data: Any = [(i, 10 * i) for i in range(5)]
        loader: Any = loading(data, batch_size=2, collate_fn=pairs)
        return list(DispatchedLoader(loader, plan(group)))

    first, second = on_ranks(2, read)
    assert all(isinstance(batch, Pair) for batch in first + second)
    assert [batch.x.tolist() for batch in first] == [[0, 1], [4]]
    assert [batch.y.tolist() for batch in second] == [[20, 30], [0]]


@pytest.mark.parametrize("seed", range(draws(40, 1000)))
def test_every_rank_has_its_part_of_each_round(seed: int, groups: Any) -> None:
    """A round is a batch that is split, or a batch for each rank. What is left at the
    end is dropped, or filled up with the first rows, or distributed as it is."""
    rng = random.Random(seed)
    ranks, split, even, drop = rng.randint(1, 3), *(rng.random() < 0.5 for _ in "abc")
    size = rng.randint(1, 3) * (ranks if split else 1)
    rows = list(range(rng.randint(ranks, 20)))

    def read(group: _C.Communicator) -> list[list[int]]:
        groups.group = group
        plan = BatchPlan(group.rank, ranks, split, True, even, True)
        loader: Any = loading(rows, batch_size=size, drop_last=drop)
        dispatched = DispatchedLoader(loader, plan)
        found = [batch.tolist() for batch in dispatched]
        assert len(found) == len(dispatched) or not (even or drop)
        return found

    together = size if split else size * ranks
    rounds = [rows[at : at + together] for at in range(0, len(rows), together)]
    left = len(rows) % together
    if left and drop:
        rounds.pop()
    elif even and left % ranks:
        rounds[-1] += rows[: ranks - left % ranks]
    expected: list[list[list[int]]] = [[] for _ in range(ranks)]
    for batch in rounds:
        each = -(-len(batch) // ranks)
        for rank in range(ranks):
            part = batch[rank * each : (rank + 1) * each]
            if part:
                expected[rank].append(part)
    assert on_ranks(ranks, read) == expected


class Broken(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise OSError("the disk is gone")


def test_all_ranks_are_told_when_rank_0_cannot_read_on(groups: Any) -> None:
    def read(group: _C.Communicator) -> str:
        groups.group = group
        loader: Any = loading(Broken(), batch_size=1)
        with pytest.raises((OSError, RuntimeError)) as raised:
            list(DispatchedLoader(loader, plan(group)))
        return str(raised.value)

    first, second = on_ranks(2, read)
    assert first == "the disk is gone"
    assert second == "rank 0 could not read on; its own error says why"


def test_what_is_no_tensor_is_rejected_with_what_to_do(groups: Any) -> None:
    def read(group: _C.Communicator) -> str:
        groups.group = group
        loader: Any = loading(["a", "b"], batch_size=1)
        with pytest.raises((TypeError, RuntimeError)) as raised:
            list(DispatchedLoader(loader, plan(group)))
        return str(raised.value)

    assert "a batch has a str; set dispatch_batches to False" in on_ranks(2, read)[0]
