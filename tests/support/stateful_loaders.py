"""Loaders and data sets that say where they are, and that note the rows they read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

N, BATCH = 64, 4


def row(i: int) -> dict[str, torch.Tensor]:
    x = torch.sin(torch.arange(8) * (i + 1.0))
    return {"x": x, "labels": x.sum()}


class Noted:
    """Appends the number of each row that is read to a file, from any process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def row(self, i: int) -> dict[str, torch.Tensor]:
        with open(self.path, "a") as file:
            file.write(f"{i}\n")
        return row(i)

    def read(self) -> list[int]:
        """The rows since the last call."""
        if not self.path.exists():
            return []
        rows = list(map(int, self.path.read_text().split()))
        os.remove(self.path)
        return rows


class Stream(IterableDataset[Any]):
    """A stream with a state; its workers take turns, row by row."""

    def __init__(self, noted: Noted, rank: int = 0, world: int = 1) -> None:
        self.noted, self.order = noted, range(rank, N, world)
        self.at, self.next = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["at"]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        order = self.order if info is None else self.order[info.id :: info.num_workers]
        self.at, self.next = self.next, 0
        while self.at < len(order):
            self.at += 1
            yield self.noted.row(order[self.at - 1])


class Map(torch.utils.data.Dataset[Any]):
    def __init__(self, noted: Noted, rank: int = 0, world: int = 1) -> None:
        self.noted, self.order = noted, range(rank, N, world)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> Any:
        return self.noted.row(self.order[i])


class Sub(StatefulDataLoader[Any]):
    """A user's own subclass."""


class Own:
    """A loader of no library, with a state."""

    def __init__(self, dataset: Stream, batch_size: int, num_workers: int) -> None:
        self.dataset, self.size = dataset, batch_size

    def state_dict(self) -> dict[str, int]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(DataLoader(self.dataset, self.size))
        return batches


KINDS = {
    "stream": (DataLoader, Stream),
    "stateful loader of a stream": (StatefulDataLoader, Stream),
    "stateful loader of a map": (StatefulDataLoader, Map),
    "subclass of a stateful loader": (Sub, Stream),
    "own loader": (Own, Stream),
}


def trainer_of(
    package: Any, args: Any, model: Any, kind: str, noted: Noted, workers: int,
    rank: int = 0, world: int = 1,
) -> Any:  # fmt: skip
    """A trainer whose get_train_dataloader() returns the loader."""
    loader, dataset = KINDS[kind]

    class Given(package.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            data: Any = dataset(noted, rank, world)
            return loader(data, batch_size=BATCH, num_workers=workers)

    return Given(model, args, train_dataset=dataset(noted, rank, world))
