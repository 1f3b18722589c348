"""Order and position of torch's data loaders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ctrainer.adapters import lengths
from ctrainer.adapters.lengths import Seekable, as_lengths
from ctrainer.adapters.reading import SeededOrder
from ctrainer.arguments.accelerator import config_of
from ctrainer.runtime.hooks import rows_by_name


class _EpochSampler(Sampler[int], Seekable, SeededOrder):
    """An order of num_samples rows that follows from a seed and the epoch."""

    def __init__(self, dataset: Any, seed: int, num_samples: int) -> None:
        self.data_source = dataset
        self.seed = seed
        self.epoch = 0
        self.num_samples = num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return self.after(0)


class SeededSampler(_EpochSampler):
    """A permutation of the data set, new for each epoch: that of a generator seeded
    with the run's seed plus the epoch. Source: accelerate's SeedableRandomSampler,
    whose order it has."""

    def __init__(self, dataset: Any, args: Any, num_samples: int | None = None) -> None:
        seed = torch.initial_seed() if args.data_seed is None else args.data_seed
        super().__init__(
            dataset, seed, len(dataset) if num_samples is None else num_samples
        )

    def after(self, n: int, keep: int = 0) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        rows = len(self.data_source)
        sizes = _permutations(rows, self.num_samples)
        yield from _permuted(rows, sizes, generator, n, keep)


class DrawnSampler(_EpochSampler):
    """A RandomSampler's order by a generator of its own, whose seed is drawn from
    torch's when the sampler is made; ranks take over the first one's.

    Epoch n has what the n-th pass over it would have, so a resumed run finds it again.
    Source: accelerate 1.x, prepare_data_loader without use_seedable_sampler.
    """

    def __init__(self, dataset: Any, num_samples: int) -> None:
        super().__init__(dataset, _drawn_seed(), num_samples)

    def after(self, n: int, keep: int = 0) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        rows = len(self.data_source)
        sizes = _permutations(rows, self.num_samples)
        for _ in range(self.epoch * len(sizes)):
            torch.randperm(rows, generator=generator, device="cpu")
        self.epoch += 1
        yield from _permuted(rows, sizes, generator, n, keep)


def _drawn_seed() -> int:
    """What torch's samplers seed their generators with, of torch's own."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _permutations(rows: int, num_samples: int) -> list[int]:
    """How many indices a RandomSampler takes of each permutation of the rows; of the
    last perhaps none, and it draws it all the same."""
    whole, rest = divmod(num_samples, rows)
    return [rows] * whole + [rest]


def _permuted(
    rows: int, sizes: list[int], generator: torch.Generator, n: int, keep: int
) -> Iterator[int]:
    """The order of a RandomSampler without replacement, as Seekable.after().

    Source: torch 2.13, RandomSampler.
    """
    first = 0  # the permutation's place in the order
    for size in filter(None, sizes):
        order = torch.randperm(rows, generator=generator, device="cpu")[:size]
        skipped, kept = max(n - first, 0), max(keep - first, 0)
        yield from lengths.indices(order.numpy(), skipped, kept)
        first += size


def _randomly(sampler: RandomSampler, n: int, keep: int) -> Iterator[int]:
    """What a RandomSampler without replacement gives, and draws."""
    generator: torch.Generator | None = sampler.generator
    rows = len(sampler.data_source)
    sizes = _permutations(rows, sampler.num_samples)
    if generator is None:
        seed = _drawn_seed()
        generator = torch.Generator()
        generator.manual_seed(seed)
    yield from _permuted(rows, sizes, generator, n, keep)
    if not sizes[-1] and sampler.generator is not None:
        torch.randperm(rows, generator=generator, device="cpu")


def seeded(sampler: Any, args: Any, sharded: bool) -> Any:
    """A RandomSampler without replacement as a SeededSampler, or without
    use_seedable_sampler as a DrawnSampler where all ranks read by it, to be sharded
    batches; any other as it is."""
    plain = type(sampler) is RandomSampler and not sampler.replacement
    if not plain or sampler.generator is not None:
        return sampler
    if config_of(args.accelerator_config).use_seedable_sampler:
        return SeededSampler(sampler.data_source, args, sampler.num_samples)
    if not sharded:
        return sampler
    return DrawnSampler(sampler.data_source, sampler.num_samples)


class LengthGroupedSampler(lengths.Seekable, Sampler[int]):
    """Indices shuffled, then grouped by length, as `lengths.group` does.

    Source: transformers 5.17, LengthGroupedSampler, whose order it has.
    """

    def __init__(
        self,
        batch_size: int,
        lengths: Sequence[int],
        generator: torch.Generator | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.lengths = as_lengths(lengths)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def after(self, n: int, keep: int = 0) -> Iterator[int]:
        drawn = torch.randperm(len(self), generator=self.generator, device="cpu")
        order = drawn.numpy()
        lengths.group(order, self.lengths, self.batch_size)
        return lengths.indices(order, n, keep)


def default_collator(features: list[Any]) -> dict[str, Any]:
    """Stack the features of examples, mappings or objects with attributes, by name.

    `label` and `label_ids` become `labels`: int64, or float32 for floats. Strings and
    None are left out. Source: transformers' default_data_collator.
    """
    rows = rows_by_name(features)
    first, batch = rows[0], {}
    for name in ("label", "label_ids"):
        if first.get(name) is not None and "labels" not in batch:
            batch["labels"] = _labels([row[name] for row in rows])
    for name, value in first.items():
        if name in ("label", "label_ids") or value is None or isinstance(value, str):
            continue
        batch[name] = _stack([row[name] for row in rows])
    return batch


def _labels(values: list[Any]) -> torch.Tensor:
    first = values[0].item() if getattr(values[0], "ndim", None) == 0 else values[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(values)
    while isinstance(first, list | tuple):
        first = first[0]
    whole = isinstance(first, int) or getattr(first, "dtype", None) == "int64"
    return torch.as_tensor(
        _stack(values), dtype=torch.int64 if whole else torch.float32
    )


def _stack(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if hasattr(values[0], "__array__"):
        import numpy as np

        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


def worker_seeder(workers: int, rank: int) -> Callable[[int], None]:
    """Seeds Python's and NumPy's generators in each worker, from torch's seed there and
    the rank."""
    return partial(_seed_worker, workers, rank)


def _seed_worker(workers: int, rank: int, worker: int) -> None:
    from ctrainer.trainer_utils import seed_worker

    seed_worker(worker, workers, rank)


def after(sampler: Any, n: int, keep: int = 0) -> Iterator[Any]:
    """Its batches of indices, or indices, without those from number `keep` up to number
    n. They are not made where the sampler is known to do without; else they are passed
    over, and no row is read."""
    kind = type(sampler)
    if isinstance(sampler, Seekable):
        return sampler.after(n, keep)
    if kind is SequentialSampler:
        every = range(len(sampler))
        return itertools.chain(every[:keep], every[n:])
    if kind is RandomSampler and not sampler.replacement:
        return _randomly(sampler, n, keep)
    if kind is BatchSampler:
        size = sampler.batch_size
        rest = after(sampler.sampler, n * size, keep * size)
        return iter(BatchSampler(rest, size, sampler.drop_last))
    return _without(iter(sampler), n, keep)


def _without(found: Iterator[Any], n: int, keep: int) -> Iterator[Any]:
    yield from itertools.islice(found, keep)
    yield from itertools.islice(found, n - keep, None)
