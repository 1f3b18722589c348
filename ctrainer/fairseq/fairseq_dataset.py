"""What a fairseq data set offers: sizes, order, filtering and batching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ctrainer.fairseq import data_utils


class EpochListening:
    """Hears of the beginning of epochs."""

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether batches stay valid in the next epoch; False where set_epoch() changes
        sizes or order."""
        return True

    def set_epoch(self, epoch: int) -> None:
        """Is told the number of the epoch that begins, from 1."""


class FairseqDataset(EpochListening):
    """Base of data sets with fairseq's methods.

    Subclasses have `__getitem__`, `__len__`, `collater`, `num_tokens` and `size`, and
    if they can `num_tokens_vec`. Source: fairseq, data/fairseq_dataset.py.
    """

    supports_fetch_outside_dataloader = True

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def collater(self, samples: list[Any]) -> Any:
        """A batch of a list of samples."""
        raise NotImplementedError

    def num_tokens(self, index: int) -> int:
        """What a sample counts towards max_tokens."""
        raise NotImplementedError

    def num_tokens_vec(self, indices: Any) -> Any:
        """num_tokens() of an array of indices, as an array."""
        raise NotImplementedError

    def size(self, index: int) -> Any:
        """What is held against max_positions: a number or a tuple of them."""
        raise NotImplementedError

    def ordered_indices(self) -> Any:
        """The indices, int64, in the order in which batches are made of them."""
        return np.arange(len(self), dtype=np.int64)

    @property
    def supports_prefetch(self) -> bool:
        """Whether prefetch() is to be told an epoch's indices first."""
        return False

    def attr(self, attr: str, index: int) -> Any:
        return getattr(self, attr, None)

    def prefetch(self, indices: Any) -> None:
        raise NotImplementedError

    def get_batch_shapes(self) -> Sequence[tuple[int | None, int]] | None:
        """The shapes (sentences, tokens) that batches may have, None for any; sentences
        None is as many as max_tokens allows."""
        return None

    def batch_by_size(
        self,
        indices: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[Any]:
        """Batches of an ordered array of indices; see data_utils.batch_by_size()."""
        shapes = self.get_batch_shapes()
        if shapes is not None:
            shapes = [
                _shape(*s, max_tokens, max_sentences, required_batch_size_multiple)
                for s in shapes
            ]
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
            fixed_shapes=shapes,
        )

    def filter_indices_by_size(
        self, indices: Any, max_sizes: Any
    ) -> tuple[Any, list[int]]:
        """The indices of samples within max_sizes, and the list of the others.

        max_sizes: a number, a tuple to compare with a tuple size() one by one, None in
        it being no limit, or a dict of such tuples by the keys of a dict size().
        """
        return data_utils.split_by_size(self, indices, max_sizes)


def _shape(
    sentences: int | None,
    tokens: int,
    max_tokens: int | None,
    max_sentences: int | None,
    multiple: int,
) -> tuple[int, int]:
    """One of get_batch_shapes() with its batch size brought within the limits."""
    if sentences is None:
        if max_tokens is None:
            raise ValueError("Must specify --max-tokens: a shape has no batch size")
        sentences = max_tokens // tokens
    if max_sentences is not None:
        sentences = min(sentences, max_sentences)
    elif sentences >= multiple:
        sentences -= sentences % multiple
    return sentences, tokens
