"""Data sets that cut items or add a word to an end of them: fairseq's
truncate_dataset.py, strip_token_dataset.py, append_ and prepend_token_dataset.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ctrainer.fairseq.data.base_wrapper_dataset import BaseWrapperDataset
from ctrainer.fairseq.fairseq_dataset import SizedDataset


class _Resized(SizedDataset, BaseWrapperDataset):
    """A data set whose items have other lengths than those of the one below."""


class TruncateDataset(_Resized):
    """The first tokens of each item.

    Args:
        dataset: Indexed by item, with sizes.
        truncation_length (int): Tokens, at most.

    Example:
        >>> import numpy as np
        >>> from ctrainer.fairseq.data import BaseWrapperDataset, TruncateDataset
        >>> class Rows(list):
        ...     sizes = np.array([3, 1])
        >>> TruncateDataset(Rows([[1, 2, 3], [4]]), 2)[0]
        [1, 2]
    """

    def __init__(self, dataset: Any, truncation_length: int) -> None:
        super().__init__(dataset)
        self.truncation_length = truncation_length
        self.sizes = np.minimum(dataset.sizes, truncation_length)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index][: self.truncation_length]


class StripTokenDataset(BaseWrapperDataset):
    """Items without a word at either end.

    Args:
        dataset: Indexed by item, tensors of one dimension.
        id_to_strip (int): The number of the word.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.data import StripTokenDataset
        >>> StripTokenDataset([torch.tensor([4, 2])], 2)[0]
        tensor([4])
    """

    def __init__(self, dataset: Any, id_to_strip: int) -> None:
        super().__init__(dataset)
        self.id_to_strip = id_to_strip

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        kept = (item != self.id_to_strip).nonzero().flatten()
        return item[int(kept[0]) : int(kept[-1]) + 1] if len(kept) else item[:0]


class AppendTokenDataset(_Resized):
    """Items with a word more at their end.

    Args:
        dataset: Indexed by item, tensors of one dimension, with sizes.
        token (int | None, default None): The number of the word; None: items as they
            are.

    Example:
        >>> import numpy as np, torch
        >>> from ctrainer.fairseq.data import AppendTokenDataset
        >>> class Rows(list):
        ...     sizes = np.array([1])
        >>> AppendTokenDataset(Rows([torch.tensor([4])]), 2)[0]
        tensor([4, 2])
    """

    def __init__(self, dataset: Any, token: int | None = None) -> None:
        super().__init__(dataset)
        self.token = token
        self.sizes = np.asarray(dataset.sizes) + (token is not None)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if self.token is None:
            return item
        return torch.cat([item, item.new_tensor([self.token])])


class PrependTokenDataset(AppendTokenDataset):
    """Items with a word more at their beginning; the arguments are
    AppendTokenDataset's.

    Example:
        >>> import numpy as np, torch
        >>> from ctrainer.fairseq.data import PrependTokenDataset
        >>> class Rows(list):
        ...     sizes = np.array([1])
        >>> PrependTokenDataset(Rows([torch.tensor([4])]), 0)[0]
        tensor([0, 4])
    """

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if self.token is None:
            return item
        return torch.cat([item.new_tensor([self.token]), item])


class RandomCropDataset(TruncateDataset):
    """Tokens in a row of each item, from anywhere: where, depends on seed, epoch and
    item alone.

    Args:
        dataset: Indexed by item, with sizes.
        truncation_length (int): Tokens, at most.
        seed (int, default 1): Of the draws.

    Example:
        >>> import numpy as np, torch
        >>> from ctrainer.fairseq.data import RandomCropDataset
        >>> class Rows(list):
        ...     sizes = np.array([3])
        >>> len(RandomCropDataset(Rows([torch.tensor([4, 5, 6])]), 2)[0])
        2
    """

    def __init__(self, dataset: Any, truncation_length: int, seed: int = 1) -> None:
        super().__init__(dataset, truncation_length)
        self.seed, self.epoch = seed, 0

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        excess = len(item) - self.truncation_length
        if excess <= 0:
            return item
        random = np.random.default_rng([self.seed, self.epoch, index])
        start = int(random.integers(0, excess + 1))
        return item[start : start + self.truncation_length]

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return True  # only what is cropped changes, not how much

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch


def maybe_shorten_dataset(
    dataset: Any,
    split: str,
    shorten_data_split_list: str,
    shorten_method: str,
    tokens_per_sample: int,
    seed: int,
) -> Any:
    """Return a data set with items of at most tokens_per_sample tokens, or as it is.

    Args:
        dataset: The data set.
        split (str): Its name, such as "train".
        shorten_data_split_list (str): Names of the splits to shorten, separated by
            commas; "": all.
        shorten_method (str): "truncate", "random_crop" or "none".
        tokens_per_sample (int): Tokens of an item, at most.
        seed (int): Of "random_crop".
    """
    splits = shorten_data_split_list.split(",") if shorten_data_split_list else [split]
    if split not in splits or shorten_method == "none":
        return dataset
    if shorten_method == "truncate":
        return TruncateDataset(dataset, tokens_per_sample)
    return RandomCropDataset(dataset, tokens_per_sample, seed)
