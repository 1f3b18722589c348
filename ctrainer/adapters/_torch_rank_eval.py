"""torch's data loaders of an evaluation on several ranks: whole batches, in turns.

The rows of a batch, and therefore its loss, are those that one process would have. A
rank that has no batch in the last round gets none.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ctrainer.arguments.accelerator import BatchPlan
from ctrainer.comm.run import unpickled, world


class WholeBatchLoader:
    """Batches that rank 0 reads and sends whole: of every world_size batches the first
    to rank 0, the second to rank 1.

    All ranks iterate over it at the same time. Raises RuntimeError on the others when
    rank 0 cannot read on.
    """

    def __init__(self, loader: DataLoader[Any], plan: BatchPlan) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.batch_sampler = loader.batch_sampler
        self.drop_last = loader.drop_last
        self.plan = plan

    def __len__(self) -> int:
        return -(-len(self.loader) // self.plan.world_size)

    def __iter__(self) -> Iterator[Any]:
        if self.plan.rank == 0:
            return self.turns(self.loader)
        self.draw_seed()
        return self.turns(None)

    def draw_seed(self) -> None:
        """Draw what iter() of a torch loader draws, on a rank that does not read: with
        accelerate every rank calls it, and draws the same afterwards."""
        if isinstance(self.loader, DataLoader):
            own = self.loader.generator
            device = "cpu" if own is None else own.device
            torch.empty((), dtype=torch.int64, device=device).random_(generator=own)

    def turns(self, every: Iterable[Any] | None) -> Iterator[Any]:
        """This rank's of all batches, which rank 0 has."""
        rounds = None if every is None else _rounds(every, self.plan.world_size)
        is_last = False
        while not is_last:
            batches, is_last = receive(rounds)
            if self.plan.rank < len(batches):
                yield batches[self.plan.rank]


def _rounds(batches: Iterable[Any], n: int) -> Iterator[tuple[list[Any], bool]]:
    """Lists of n batches, and whether it is the last one, which may be shorter."""
    stream = iter(batches)
    current = list(itertools.islice(stream, n))
    while following := list(itertools.islice(stream, n)):
        yield current, False
        current = following
    yield current, True


def receive(rounds: Iterator[Any] | None) -> tuple[list[Any], bool]:
    """The next round, on every rank; `rounds` is where rank 0 takes it from."""
    group, data = world(), b""
    try:
        if rounds is not None:
            data = pickle.dumps(next(rounds), pickle.HIGHEST_PROTOCOL)
    finally:
        data = group.broadcast_bytes(data, 0)
    if not data:
        raise RuntimeError("rank 0 could not read on; its own error says why")
    found: tuple[list[Any], bool] = unpickled(data, 0)
    return found


def scatter(
    dataset: Any, plan: BatchPlan, batch_size: int, drop_last: bool,
    options: dict[str, Any],
) -> WholeBatchLoader:  # fmt: skip
    """The batches of a stream, or with split_batches of as many rows as a rank's part
    of a batch would have."""
    rows = batch_size // plan.world_size if plan.split_batches else batch_size
    loader = DataLoader(dataset, batch_size=rows, drop_last=drop_last, **options)
    return WholeBatchLoader(loader, plan)
