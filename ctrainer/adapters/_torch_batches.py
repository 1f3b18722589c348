"""Order and position of torch's data loaders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from ctrainer._rank_options import config_of


class SeededSampler(Sampler[int]):
    """A permutation of the data set, new for each epoch: that of a generator seeded
    with the run's seed plus the epoch. Source: accelerate's SeedableRandomSampler,
    whose order it has."""

    def __init__(self, dataset: Any, args: Any, num_samples: int | None = None) -> None:
        self.data_source = dataset
        seed = args.data_seed
        self.seed = torch.initial_seed() if seed is None else seed
        self.epoch = 0
        self.num_samples = len(dataset) if num_samples is None else num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        n = len(self.data_source)
        taken = 0
        while taken < self.num_samples:
            order = torch.randperm(n, generator=generator)[: self.num_samples - taken]
            taken += len(order)
            yield from order.tolist()


class DrawnSampler(Sampler[int]):
    """A RandomSampler's order by a generator of its own, whose seed is drawn from
    torch's when the sampler is made; ranks take over the first one's.

    Epoch n has what the n-th pass over it would give, so a resumed run finds it again.
    Source: accelerate 1.x, prepare_data_loader without use_seedable_sampler.
    """

    def __init__(self, dataset: Any, num_samples: int) -> None:
        self.data_source = dataset
        self.num_samples = num_samples
        self.seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        sampler = RandomSampler(
            self.data_source, num_samples=self.num_samples, generator=generator
        )
        for _ in range(self.epoch):
            for _ in sampler:
                pass
        self.epoch += 1
        return iter(sampler)


def seeded(sampler: Any, args: Any, dealt: bool) -> Any:
    """A RandomSampler without replacement as a SeededSampler, or without
    use_seedable_sampler as a DrawnSampler where all ranks read by it, to be dealt
    batches; any other as it is."""
    plain = type(sampler) is RandomSampler and not sampler.replacement
    if not plain or sampler.generator is not None:
        return sampler
    if config_of(args.accelerator_config).use_seedable_sampler:
        return SeededSampler(sampler.data_source, args, sampler.num_samples)
    if not dealt:
        return sampler
    return DrawnSampler(sampler.data_source, sampler.num_samples)


class LengthGroupedSampler(Sampler[int]):
    """Indices shuffled, then sorted by length within stretches of 50 batches, so that
    a batch needs little padding; the longest example comes first.

    Source: transformers 5.17, LengthGroupedSampler, whose order it has.
    """

    def __init__(
        self,
        batch_size: int,
        lengths: Sequence[int],
        generator: torch.Generator | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.lengths = list(lengths)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        n, lengths = len(self.lengths), self.lengths
        stretch = max(min(n // (self.batch_size * 4), 50), 1) * self.batch_size
        order = torch.randperm(n, generator=self.generator).tolist()
        parts = [
            sorted(order[i : i + stretch], key=lengths.__getitem__, reverse=True)
            for i in range(0, n, stretch)
        ]
        longest = max(range(len(parts)), key=lambda i: lengths[parts[i][0]])
        parts[0][0], parts[longest][0] = parts[longest][0], parts[0][0]
        return itertools.chain.from_iterable(parts)


def default_collator(features: list[Any]) -> dict[str, Any]:
    """Stack the features of examples, mappings or objects with attributes, by name.

    `label` and `label_ids` become `labels`: int64, or float32 for floats. Strings and
    None are left out. Source: transformers' default_data_collator.
    """
    rows = [f if isinstance(f, Mapping) else vars(f) for f in features]
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


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader, its samplers and its data set which epoch comes, as far as they
    want to know."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for part in (
        loader,
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(batch_sampler, "batch_sampler", None),
        getattr(loader, "dataset", None),
    ):
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)


class _Rest(BatchSampler):
    """The batches of a batch sampler after the first n: indices alone are passed over,
    no example is read."""

    def __init__(self, inner: Any, n: int) -> None:
        self.inner = inner
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.inner), self.n, None)

    def __len__(self) -> int:
        return max(len(self.inner) - self.n, 0)


def seek(loader: Any, n: int) -> Iterator[Any]:
    """Iterator over the loader's batches after the first n.

    With a map-style data set nothing is read of the n; any other loader is read and
    its first n batches dropped, since nothing else knows how to find the place.
    """
    inner = getattr(loader, "batch_sampler", None)
    if type(loader) is not DataLoader or inner is None:
        return itertools.islice(iter(loader), n, None)
    options = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "in_order",
        )
    }
    rest = DataLoader(loader.dataset, batch_sampler=_Rest(inner, n), **options)
    return iter(rest)
