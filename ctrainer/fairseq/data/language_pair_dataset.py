"""Sentences and their translations, by the name of data/language_pair_dataset.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ctrainer.fairseq import data_utils
from ctrainer.fairseq.fairseq_dataset import FairseqDataset


def collate(
    samples: Sequence[dict[str, Any]],
    pad_idx: int,
    eos_idx: int,
    left_pad_source: bool = True,
    left_pad_target: bool = False,
    pad_to_multiple: int = 1,
) -> dict[str, Any]:
    """A batch, the longest source first: id, nsentences, ntokens (of targets where
    there are any), net_input of src_tokens (rows, source length), src_lengths and
    prev_output_tokens (the target with </s> moved to its beginning), and target (rows,
    target length) or None; {} for no samples."""
    if not samples:
        return {}
    lengths = torch.tensor([len(s["source"]) for s in samples], device="cpu")
    lengths, order = lengths.sort(descending=True, stable=True)
    samples = [samples[i] for i in order.tolist()]

    def merge(key: str, left_pad: bool, move_eos_to_beginning: bool = False) -> Any:
        return data_utils.collate_tokens(
            [s[key] for s in samples], pad_idx, eos_idx, left_pad,
            move_eos_to_beginning, None, pad_to_multiple,
        )  # fmt: skip

    net_input = {
        "src_tokens": merge("source", left_pad_source),
        "src_lengths": lengths,
    }
    target, ntokens = None, int(lengths.sum())
    if samples[0].get("target") is not None:
        target = merge("target", left_pad_target)
        ntokens = sum(len(s["target"]) for s in samples)
        net_input["prev_output_tokens"] = merge("target", left_pad_target, True)
    return {
        "id": torch.LongTensor([s["id"] for s in samples]),
        "nsentences": len(samples),
        "ntokens": ntokens,
        "net_input": net_input,
        "target": target,
    }


class LanguagePairDataset(FairseqDataset):
    """The items of `src` beside those of `tgt`, or alone.

    Args:
        src: Indexed by item, tensors of one dimension.
        src_sizes: Their lengths.
        src_dict: Dictionary of the source.
        tgt (default None): Likewise of the target; None: without.
        tgt_sizes (default None): Their lengths.
        tgt_dict (default None): Dictionary that agrees with src_dict in the special
            words' numbers.
        left_pad_source (bool, default True): Pad sources on the left.
        left_pad_target (bool, default False): Pad targets on the left.
        shuffle (bool, default True): Batches of equal lengths are of random items.
        pad_to_multiple (int, default 1): Pad to a multiple of so many tokens.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.data import Dictionary, LanguagePairDataset
        >>> words, rows = Dictionary(), [torch.tensor([3, 2])]
        >>> pairs = LanguagePairDataset(rows, [2], words, rows, [2], words)
        >>> pairs.collater([pairs[0]])["net_input"]["src_tokens"]
        tensor([[3, 2]])
    """

    def __init__(
        self,
        src: Any,
        src_sizes: Any,
        src_dict: Any,
        tgt: Any = None,
        tgt_sizes: Any = None,
        tgt_dict: Any = None,
        left_pad_source: bool = True,
        left_pad_target: bool = False,
        shuffle: bool = True,
        pad_to_multiple: int = 1,
    ) -> None:
        _check(src, src_dict, tgt, tgt_dict)
        self.src, self.tgt = src, tgt
        self.src_sizes = np.array(src_sizes)
        self.tgt_sizes = None if tgt_sizes is None else np.array(tgt_sizes)
        self.src_dict, self.tgt_dict = src_dict, tgt_dict
        self.left_pad_source, self.left_pad_target = left_pad_source, left_pad_target
        self.shuffle = shuffle
        self.pad_to_multiple = pad_to_multiple

    @property
    def sizes(self) -> Any:
        """(n,) of sources, or (n, 2) of sources and targets."""
        if self.tgt_sizes is None:
            return self.src_sizes
        return np.stack([self.src_sizes, self.tgt_sizes], axis=1)

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, index: int) -> dict[str, Any]:
        target = None if self.tgt is None else self.tgt[index]
        return {"id": index, "source": self.src[index], "target": target}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch as data.language_pair_dataset.collate makes it.

        Args:
            samples (list[dict[str, Any]]): As `__getitem__` returns them.
        """
        return collate(
            samples, self.src_dict.pad(), self.src_dict.eos(), self.left_pad_source,
            self.left_pad_target, self.pad_to_multiple,
        )  # fmt: skip

    def num_tokens(self, index: int) -> int:
        """Return the length of the longer of source and target.

        Args:
            index (int): Of the sample.
        """
        return int(max(self.size(index)))

    def num_tokens_vec(self, indices: Any) -> Any:
        sizes = self.src_sizes[indices]
        if self.tgt_sizes is not None:
            sizes = np.maximum(sizes, self.tgt_sizes[indices])
        return sizes

    def size(self, index: int) -> tuple[int, int]:
        target = 0 if self.tgt_sizes is None else self.tgt_sizes[index]
        return int(self.src_sizes[index]), int(target)

    def ordered_indices(self) -> Any:
        """Return the indices by the source's length, then the target's; see `shuffle`
        for the rest."""
        n = len(self)
        order = np.random.permutation(n) if self.shuffle else np.arange(n)
        if self.tgt_sizes is not None:
            order = order[np.argsort(self.tgt_sizes[order], kind="mergesort")]
        return order[np.argsort(self.src_sizes[order], kind="mergesort")]

    def filter_indices_by_size(
        self, indices: Any, max_sizes: Any
    ) -> tuple[Any, list[int]]:
        """Return the indices of pairs within max_sizes, and the list of the others.

        Args:
            indices: (n,).
            max_sizes: A number for both, or a pair of source's and target's.
        """
        return data_utils.filter_paired_dataset_indices_by_size(
            self.src_sizes, self.tgt_sizes, indices, max_sizes
        )

    @property
    def supports_prefetch(self) -> bool:
        parts = [self.src] if self.tgt is None else [self.src, self.tgt]
        return all(getattr(part, "supports_prefetch", False) for part in parts)

    def prefetch(self, indices: Any) -> None:
        self.src.prefetch(indices)
        if self.tgt is not None:
            self.tgt.prefetch(indices)


def _check(src: Any, src_dict: Any, tgt: Any, tgt_dict: Any) -> None:
    if tgt is not None and len(src) != len(tgt):
        raise ValueError(
            "Source and target must contain the same number of examples, got "
            f"{len(src)} and {len(tgt)}"
        )
    for word in ("pad", "eos", "unk"):
        if tgt_dict is None:
            return
        ours, theirs = getattr(src_dict, word)(), getattr(tgt_dict, word)()
        if ours != theirs:
            raise ValueError(
                f"the dictionaries' {word} must have one number, not {ours} in the "
                f"source's and {theirs} in the target's"
            )
