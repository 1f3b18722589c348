"""Orders of torch's samplers, begun at any place: torch's own to the index, with the
same use of generators, and without all of it as numbers of Python's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import EXHAUSTIVE, draws
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from ctrainer.adapters import _torch_batches as batches
from ctrainer.adapters import lengths
from ctrainer.adapters import torch as torch_adapter
from ctrainer.adapters._torch_ranks import RankBatches
from ctrainer.arguments.accelerator import BatchPlan

ARGS: Any = SimpleNamespace(data_seed=7)


class Reversed(RandomSampler):
    def __iter__(self) -> Any:
        return iter(range(len(self) - 1, -1, -1))


def sampler_of(rng: torch.Generator, owned: bool | None) -> Any:
    """One drawn at random, and the generator that it has for itself."""
    n, kind = 1 + draw(rng, 40), draw(rng, 8)
    rows, generator = range(n), torch.Generator().manual_seed(5) if owned else None
    some = 1 + draw(rng, 100)
    if kind < 3:
        count = [None, some, 2 * n][kind]
        return RandomSampler(rows, num_samples=count, generator=generator), generator
    if kind == 3:
        return RandomSampler(rows, True, some, generator), generator
    if kind == 4:
        return SequentialSampler(rows), None
    if kind == 5:
        return SubsetRandomSampler([*range(0, n, 2)], generator), generator
    if kind == 6:
        return Reversed(rows), None
    return batches.SeededSampler(rows, ARGS, some), None


def draw(rng: torch.Generator, n: int) -> int:
    return int(torch.randint(n, (), generator=rng))


def read(order: Any, generator: torch.Generator | None) -> tuple[list[Any], list[Any]]:
    """The indices, and where the generators were after each."""
    torch.manual_seed(3)
    found, states = [], []
    while True:
        index = next(order, None)
        own = b"" if generator is None else generator.get_state().numpy().tobytes()
        states.append((own, torch.get_rng_state().numpy().tobytes()))
        if index is None:
            return found, states
        found.append(index)


@pytest.mark.parametrize("seed", range(draws(100, 5000)))
def test_an_order_begun_anywhere_is_torchs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "_AT_ONCE", 7)
    rng = torch.Generator().manual_seed(seed)
    owned, state = bool(draw(rng, 2)), rng.get_state()

    def make() -> Any:
        rng.set_state(state)
        sampler, generator = sampler_of(rng, owned)
        if draw(rng, 2):
            size, drop_last = 1 + draw(rng, 5), bool(draw(rng, 2))
            sampler = BatchSampler(sampler, size, drop_last)
        return sampler, generator

    sampler, generator = make()
    whole, states = read(iter(sampler), generator)
    n = draw(rng, len(whole) + 2)
    keep = draw(rng, n + 1)
    sampler, generator = make()
    found, then = read(batches.after(sampler, n, keep), generator)
    assert found == whole[:keep] + whole[max(n, keep) :]
    assert then[-1] == states[-1]
    if n == keep:
        assert then == states


@pytest.mark.parametrize(("rows", "count"), [(7, 7), (7, 4), (5, 12), (4, 8)])
def test_a_drawn_order_is_that_of_a_later_pass(rows: int, count: int) -> None:
    torch.manual_seed(0)
    drawn = batches.DrawnSampler(range(rows), count)
    generator = torch.Generator().manual_seed(drawn.seed)
    passes = RandomSampler(range(rows), num_samples=count, generator=generator)
    for epoch in range(4):
        expected = list(passes)
        drawn.set_epoch(epoch)
        assert list(drawn) == expected
        drawn.set_epoch(epoch)
        assert list(drawn.after(3, 1)) == expected[:1] + expected[3:]


@pytest.mark.parametrize("seed", range(draws(60, 3000)))
def test_a_ranks_batches_begun_anywhere_are_its_own(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    world_size, size = 1 + draw(rng, 4), 1 + draw(rng, 3)
    split, state = bool(draw(rng, 2)), rng.get_state()
    plan = BatchPlan(
        rank=draw(rng, world_size), world_size=world_size, split_batches=split,
        even_batches=bool(draw(rng, 2)), dispatch_batches=False, drops_last=True,
    )  # fmt: skip

    def make() -> RankBatches:
        rng.set_state(state)
        sampler, _ = sampler_of(rng, None)
        together = size * (world_size if split else 1)
        return RankBatches(BatchSampler(sampler, together, bool(seed % 3)), plan)

    torch.manual_seed(1)
    whole = list(make())
    for n in (0, 1, 2, len(whole) // 2, len(whole)):
        torch.manual_seed(1)
        assert list(make().after(n)) == whole[n:]
        torch.manual_seed(1)
        found = list(make().after(max(n, 1), 1))
        assert found == whole[:1] + whole[max(n, 1) :]


class Rows(torch.utils.data.Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i


@pytest.mark.parametrize("own", [True, False])
def test_a_place_in_a_large_shuffled_order_is_found_soon(own: bool) -> None:
    n = 10**8 if EXHAUSTIVE else 10**6
    data, began = Rows(n), time.process_time()
    torch.manual_seed(0)
    order = torch.randperm(n)
    drawing = time.process_time() - began
    expected = order[n - 100 :].tolist()
    sampler: Any = batches.SeededSampler(data, SimpleNamespace(data_seed=0))
    if not own:
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, 100, sampler=sampler)
    del order
    began = time.process_time()
    found = next(torch_adapter.reader(loader, 3).start(0, n // 100 - 1, None))
    taken = time.process_time() - began
    assert found.tolist() == expected
    assert taken < 1.2 * drawing + 1.0
