"""Kinds of training data whose rows draw random numbers, for tests of resuming."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

N, WIDTH, BATCH = 22, 8, 4


def drawn() -> torch.Tensor:
    """What a row draws: of torch's, Python's and NumPy's generators."""
    noise = torch.randn(WIDTH) / 8
    return noise + random.gauss(0.0, 0.1) + float(np.random.normal(0.0, 0.1))


def row(i: int) -> dict[str, torch.Tensor]:
    x = torch.sin(torch.arange(WIDTH) * (i + 1.0)) + drawn()
    return {"x": x, "labels": x.sum()}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that draws, as those of masked language models do."""
    batch = stack(rows)
    batch["x"] = batch["x"] * (torch.rand(batch["x"].shape) > 0.1)
    return batch


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([r[name] for r in rows]) for name in ("x", "labels")}


def rare_row(i: int) -> dict[str, torch.Tensor]:
    """Most draw nothing."""
    x = torch.sin(torch.arange(WIDTH) * (i + 1.0))
    x = x + drawn() if i % 9 == 0 else x
    return {"x": x, "labels": x.sum()}


class Mapped(Dataset[Any]):
    """Map-style, with rows of unequal length."""

    def __init__(self) -> None:
        self.lengths = [1 + i * 7 % 5 for i in range(N)]

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {**row(i), "input_ids": torch.zeros(self.lengths[i])}


class Stream(IterableDataset[Any]):
    """Rows in an order of the epoch; workers take turns."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        order = list(range(N))
        random.Random(self.epoch).shuffle(order)
        info = get_worker_info()
        return order if info is None else order[info.id :: info.num_workers]

    def __iter__(self) -> Iterator[Any]:
        for i in self.order():
            yield row(i)


class RareMapped(Mapped):
    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return rare_row(i)


class RareStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return map(rare_row, self.order())


class Sized(Stream):
    """A stream with a length, drawn through a buffer in which rows are shuffled by the
    global generator."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for found in super().__iter__():
            buffer.append(found)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5))
        yield from buffer


class Stateful(Stream):
    """A stream that says where it is, and that counts the rows that it makes."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.told: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "extra": (1, b"2", np.arange(3), torch.ones(2))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["extra"][:2] == (1, b"2")
        self.told = state["at"]

    def __iter__(self) -> Iterator[Any]:
        self.at, self.told = self.told or 0, None
        order = self.order()
        while self.at < len(order):
            self.at += 1
            Stateful.made += 1
            yield row(order[self.at - 1])


def plain_rows(batch: dict[str, list[int]]) -> dict[str, Any]:
    x = [[float(np.sin(k * (i + 1.0))) for k in range(WIDTH)] for i in batch["i"]]
    return {"x": x, "labels": [sum(values) for values in x]}


def drawn_rows(batch: dict[str, list[int]]) -> dict[str, Any]:
    rows = [row(i) for i in batch["i"]]
    return {name: [r[name].tolist() for r in rows] for name in ("x", "labels")}


def hf_stream(rows: Any = plain_rows) -> Any:
    """A stream of `datasets`, in four shards, mapped in batches that are no
    trainer's."""
    from datasets import Dataset as Table

    table = Table.from_dict({"i": list(range(N))})
    stream = table.to_iterable_dataset(num_shards=4)
    stream = stream.map(rows, batched=True, batch_size=3, remove_columns=["i"])
    return stream.with_format("torch")


def hf_drawn() -> Any:
    return hf_stream(drawn_rows)


def hf_shuffled() -> Any:
    """Its rows draw nothing: `datasets` makes them in threads, in any order."""
    return hf_stream().shuffle(seed=3, buffer_size=5)


class TokenStream(Stream):
    """As one that tokenises: its generator of rows is not its own object."""

    def __iter__(self) -> Iterator[Any]:
        return map(row, self.order())


DATA: dict[str, Callable[[], Any]] = {
    "map-style": Mapped,
    "stream": Stream,
    "stream of an iterator": TokenStream,
    "stream with a state": Stateful,
    "sized stream": Sized,
    "map-style, rarely drawn": RareMapped,
    "stream, rarely drawn": RareStream,
    "datasets": hf_stream,
    "datasets, drawn": hf_drawn,
    "datasets, shuffled": hf_shuffled,
}


def loader_of(kind: str, dataset: Any, workers: int, persistent: bool) -> Any:
    """A loader of the user's own: torchdata's, or a plain iterable."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    options = {"batch_size": BATCH, "collate_fn": collate, "num_workers": workers}
    options["persistent_workers"] = persistent
    if kind == "stateful loader":
        return StatefulDataLoader(dataset, **options)
    if kind == "loader with a generator":
        generator = torch.Generator().manual_seed(5)
        return DataLoader(dataset, shuffle=True, generator=generator, **options)
    assert kind == "object"
    return Batches()


class Batches:
    """Batches of which a trainer knows nothing but that they come."""

    def __iter__(self) -> Iterator[Any]:
        for i in range(0, N, BATCH):
            yield collate([row(j) for j in range(i, min(i + BATCH, N))])


LOADERS = {
    "stateful loader of a map": ("stateful loader", Mapped),
    "stateful loader of a stream": ("stateful loader", Stream),
    "stateful loader of a state": ("stateful loader", Stateful),
    "loader with a generator": ("loader with a generator", Mapped),
    "object": ("object", Mapped),
}
