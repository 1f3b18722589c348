"""Several data sets, one after another, as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ctrainer.fairseq.fairseq_dataset import FairseqDataset


def _sizes(dataset: Any) -> Any:
    """The array of a data set's sizes, which may be the only one of a list."""
    return dataset.sizes[0] if isinstance(dataset.sizes, list) else dataset.sizes


class ConcatDataset(FairseqDataset):
    """The samples of several data sets, in their order.

    Args:
        datasets (Sequence[Any]): One or more.
        sample_ratios (int | Sequence[int], default 1): How often each set is taken, a
            whole number for all or one for each; its samples are then repeated.

    Raises:
        ValueError: no data sets, or another number of ratios.

    Source: fairseq, data/concat_dataset.py.

    Example:
        >>> from ctrainer.fairseq.data import ConcatDataset
        >>> len(ConcatDataset([[1, 2], [3]], sample_ratios=[1, 2]))
        4
    """

    def __init__(
        self, datasets: Sequence[Any], sample_ratios: int | Sequence[int] = 1
    ) -> None:
        if len(datasets) == 0:
            raise ValueError("datasets should not be an empty iterable")
        if isinstance(sample_ratios, int):
            sample_ratios = [sample_ratios] * len(datasets)
        if len(sample_ratios) != len(datasets):
            raise ValueError(
                f"sample_ratios has {len(sample_ratios)} numbers for {len(datasets)} "
                "data sets"
            )
        self.datasets = list(datasets)
        self.sample_ratios = list(sample_ratios)
        self.real_sizes = [len(d) for d in self.datasets]
        taken = zip(self.real_sizes, self.sample_ratios, strict=True)
        self.cumulative_sizes = list(accumulate(int(r * n) for n, r in taken))

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def _get_dataset_and_sample_index(self, idx: int) -> tuple[int, int]:
        if not 0 <= idx < len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        at = bisect_right(self.cumulative_sizes, idx)
        before = self.cumulative_sizes[at - 1] if at > 0 else 0
        return at, (idx - before) % self.real_sizes[at]

    def __getitem__(self, index: int) -> Any:
        at, i = self._get_dataset_and_sample_index(index)
        return self.datasets[at][i]

    def collater(self, samples: list[Any], **extra_args: Any) -> Any:
        """Return a batch as the first data set collates it, or as torch does.

        Args:
            samples (list[Any]): As `__getitem__` returns them.
            **extra_args: Of the data set's collater.
        """
        if hasattr(self.datasets[0], "collater"):
            return self.datasets[0].collater(samples, **extra_args)
        from ctrainer.adapters._torch_data import default_collate

        return default_collate(samples, **extra_args)

    def size(self, index: int) -> Any:
        at, i = self._get_dataset_and_sample_index(index)
        return self.datasets[at].size(i)

    def num_tokens(self, index: int) -> int:
        return int(np.max(self.size(index)))

    def attr(self, attr: str, index: int) -> Any:
        at, _ = self._get_dataset_and_sample_index(index)
        return getattr(self.datasets[at], attr, None)

    @property
    def sizes(self) -> Any:
        """The sizes of all samples: of shape (n,), or (n, 2) of sources and targets."""
        parts = zip(self.datasets, self.sample_ratios, strict=True)
        return np.concatenate([np.concatenate([_sizes(d)] * r) for d, r in parts])

    def ordered_indices(self) -> Any:
        """Return the indices by size; those of pairs by the source's, then by the
        target's."""
        sizes = self.sizes
        if sizes.ndim == 1:
            return np.argsort(sizes)
        by_target = np.argsort(sizes[:, 1], kind="mergesort")
        return by_target[np.argsort(sizes[by_target, 0], kind="mergesort")]

    @property
    def supports_prefetch(self) -> bool:
        return all(getattr(d, "supports_prefetch", False) for d in self.datasets)

    def prefetch(self, indices: Any) -> None:
        wanted: list[list[int]] = [[] for _ in self.datasets]
        for at, i in map(self._get_dataset_and_sample_index, indices):
            wanted[at].append(i)
        for dataset, own in zip(self.datasets, wanted, strict=True):
            if getattr(dataset, "supports_prefetch", False):
                dataset.prefetch(own)

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return all(
            getattr(d, "can_reuse_epoch_itr_across_epochs", False)
            for d in self.datasets
        )

    def set_epoch(self, epoch: int) -> None:
        for dataset in self.datasets:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
