"""Data sets over another, by the name of fairseq's data/base_wrapper_dataset.py."""

from __future__ import annotations

from typing import Any

from ctrainer.fairseq.fairseq_dataset import FairseqDataset


class DatasetOverAnother(FairseqDataset):
    """Has another data set, which may be a plain list, in `dataset`, and passes on what
    concerns epochs and prefetching."""

    dataset: Any

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return bool(getattr(self.dataset, "can_reuse_epoch_itr_across_epochs", True))

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def supports_prefetch(self) -> bool:
        return bool(getattr(self.dataset, "supports_prefetch", False))

    def prefetch(self, indices: Any) -> None:
        self.dataset.prefetch(indices)


class BaseWrapperDataset(DatasetOverAnother):
    """Asks another data set for all; subclasses change what they are for.

    Args:
        dataset: The other data set.

    Example:
        >>> from ctrainer.fairseq.data import BaseWrapperDataset
        >>> len(BaseWrapperDataset([1, 2, 3]))
        3
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def collater(self, samples: list[Any]) -> Any:
        return self.dataset.collater(samples)

    @property
    def sizes(self) -> Any:
        """The other data set's lengths."""
        return self.dataset.sizes

    def num_tokens(self, index: int) -> int:
        return int(self.dataset.num_tokens(index))

    def size(self, index: int) -> Any:
        return self.dataset.size(index)

    def ordered_indices(self) -> Any:
        return self.dataset.ordered_indices()

    def attr(self, attr: str, index: int) -> Any:
        return self.dataset.attr(attr, index)

    def batch_by_size(
        self,
        indices: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[Any]:
        return self.dataset.batch_by_size(  # type: ignore[no-any-return]
            indices, max_tokens, max_sentences, required_batch_size_multiple
        )

    def filter_indices_by_size(
        self, indices: Any, max_sizes: Any
    ) -> tuple[Any, list[int]]:
        kept, ignored = self.dataset.filter_indices_by_size(indices, max_sizes)
        return kept, ignored
