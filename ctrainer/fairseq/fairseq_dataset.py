"""The methods of a fairseq data set: sizes, order, filtering and batching."""

from __future__ import annotations

from typing import Any

import numpy as np

from ctrainer.fairseq import data_utils


class EpochListening:
    """Hears of the beginning of epochs.

    Example:
        >>> from ctrainer.fairseq.data import EpochListening
        >>> EpochListening().set_epoch(1)
    """

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether batches stay valid in the next epoch; False where set_epoch() changes
        sizes or order."""
        return True

    def set_epoch(self, epoch: int) -> None:
        """Take in the number of the epoch that begins.

        Args:
            epoch (int): From 1.
        """


class FairseqDataset(EpochListening):
    """Base of data sets with fairseq's methods.

    Subclasses have `__getitem__`, `__len__`, `collater`, `num_tokens` and `size`, and
    if they can `num_tokens_vec`.

    Source: fairseq, data/fairseq_dataset.py.

    Example:
        >>> from ctrainer.fairseq.data import FairseqDataset
        >>> class Numbers(FairseqDataset):
        ...     def __getitem__(self, index):
        ...         return index
        ...     def __len__(self):
        ...         return 3
        ...     def num_tokens(self, index):
        ...         return 1
        >>> Numbers().ordered_indices()
        array([0, 1, 2])
    """

    supports_fetch_outside_dataloader = True

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def collater(self, samples: list[Any]) -> Any:
        """Return a batch of a list of samples.

        Args:
            samples (list[Any]): As `__getitem__` returns them.
        """
        raise NotImplementedError

    def num_tokens(self, index: int) -> int:
        """Return what a sample counts towards max_tokens.

        Args:
            index (int): Of the sample.
        """
        raise NotImplementedError

    def num_tokens_vec(self, indices: Any) -> Any:
        """Return num_tokens() of an array of indices, as an array.

        Args:
            indices: (n,).
        """
        raise NotImplementedError

    def size(self, index: int) -> Any:
        """Return what is held against max_positions: a number or a tuple of them.

        Args:
            index (int): Of the sample.
        """
        raise NotImplementedError

    def ordered_indices(self) -> Any:
        """Return the indices, int64, in the order in which batches are made of them."""
        return np.arange(len(self), dtype=np.int64)

    @property
    def supports_prefetch(self) -> bool:
        """Whether prefetch() is to be called with an epoch's indices first."""
        return False

    def attr(self, attr: str, index: int) -> Any:
        """Return an attribute of the data set that a sample is of, or None.

        Args:
            attr (str): Its name.
            index (int): Of the sample.
        """
        return getattr(self, attr, None)

    def prefetch(self, indices: Any) -> None:
        """Prefetch samples; for data sets with supports_prefetch.

        Args:
            indices: Of the samples.
        """
        raise NotImplementedError

    def batch_by_size(
        self,
        indices: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[Any]:
        """Return batches of ordered indices; see data_utils.batch_by_size().

        Args:
            indices: (n,).
            max_tokens (int | None, default None): Samples times the longest, at most;
                None is no limit.
            max_sentences (int | None, default None): Samples, at most; None is no
                limit.
            required_batch_size_multiple (int, default 1): A batch of more samples has a
                multiple of it.
        """
        try:
            num_tokens_vec = np.asarray(self.num_tokens_vec(indices), np.int64)
        except NotImplementedError:
            num_tokens_vec = None
        return data_utils.batch_by_size(
            indices,
            num_tokens_fn=self.num_tokens,
            num_tokens_vec=num_tokens_vec,
            max_tokens=max_tokens,
            max_sentences=max_sentences,
            required_batch_size_multiple=required_batch_size_multiple,
        )

    def filter_indices_by_size(
        self, indices: Any, max_sizes: Any
    ) -> tuple[Any, list[int]]:
        """Return the indices of samples within max_sizes, and the list of the others.

        Args:
            indices: (n,).
            max_sizes: A number, a tuple to compare with a tuple size() one by one, None
                in it being no limit, or a dict of such tuples by the keys of a dict
                size().
        """
        return data_utils.split_by_size(self, indices, max_sizes)


class SizedDataset(FairseqDataset):
    """A data set whose samples have one length each: `sizes`, (n,)."""

    sizes: Any = None

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])
