"""Blocks of text for language models, by the name of data/monolingual_dataset.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ctrainer.fairseq.data.base_wrapper_dataset import DatasetOverAnother
from ctrainer.fairseq.data_utils import collate_tokens
from ctrainer.fairseq.fairseq_dataset import SizedDataset

_TARGETS = {"self", "future", "past"}


def collate(
    samples: Sequence[dict[str, Any]],
    pad_idx: int,
    eos_idx: int,
    fixed_pad_length: int | None = None,
    pad_to_bsz: int | None = None,
) -> dict[str, Any]:
    """A batch: id, nsentences, ntokens, net_input of src_tokens (rows, longest) and
    src_lengths (rows,), and target as src_tokens, or a list of such; {} for no samples.
    """
    if not samples:
        return {}

    def merge(values: list[Any]) -> Any:
        return collate_tokens(
            values, pad_idx, eos_idx, False,
            pad_to_length=fixed_pad_length, pad_to_bsz=pad_to_bsz,
        )  # fmt: skip

    source = merge([s["source"] for s in samples])
    target, first = source, samples[0]["target"]
    if isinstance(first, list):
        columns = range(len(first))
        target = [merge([s["target"][i] for s in samples]) for i in columns]
    elif first is not None:
        target = merge([s["target"] for s in samples])
    lengths = [len(s["source"]) for s in samples]
    return {
        "id": torch.LongTensor([s["id"] for s in samples]),
        "nsentences": len(samples),
        "ntokens": sum(lengths),
        "net_input": {"src_tokens": source, "src_lengths": torch.LongTensor(lengths)},
        "target": target,
    }


class MonolingualDataset(SizedDataset, DatasetOverAnother):
    """The items of `dataset` with their targets, as a language model takes them.

    Args:
        dataset: Returns (source, future, past), as TokenBlockDataset with
            include_targets; with targets None it returns the source alone.
        sizes: Lengths of its items.
        src_vocab: Dictionary.
        tgt_vocab (default None): Dictionary; where it is smaller, words beyond it
            become <unk> in targets. None: src_vocab.
        add_eos_for_other_targets (bool, default False): With "self" or "past", </s>
            ends each source.
        shuffle (bool, default False): Batches of equal lengths are of random items.
        targets (Sequence[str] | None, default None): Which of "self", "future" and
            "past" are learnt; of several, the target is a list.
        add_bos_token (bool, default False): Put <s> before sources and targets.
        fixed_pad_length (int | None, default None): Pad batches to that width.
        pad_to_bsz (int | None, default None): Pad batches to that height.
        src_lang_idx, tgt_lang_idx (int | None, default None): For fairseq's sake.

    Raises:
        ValueError: other targets.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.data import Dictionary, MonolingualDataset
        >>> rows = [torch.tensor([4, 2])]
        >>> data = MonolingualDataset(rows, [2], Dictionary())
        >>> data.size(0)
        2
    """

    def __init__(
        self,
        dataset: Any,
        sizes: Any,
        src_vocab: Any,
        tgt_vocab: Any = None,
        add_eos_for_other_targets: bool = False,
        shuffle: bool = False,
        targets: Sequence[str] | None = None,
        add_bos_token: bool = False,
        fixed_pad_length: int | None = None,
        pad_to_bsz: int | None = None,
    ) -> None:
        if targets is not None and not _TARGETS.issuperset(targets):
            raise ValueError(
                f"targets must be of 'self', 'future' and 'past', got {list(targets)}"
            )
        self.dataset = dataset
        self.sizes = np.array(sizes)
        self.vocab = src_vocab
        self.tgt_vocab = src_vocab if tgt_vocab is None else tgt_vocab
        self.add_eos_for_other_targets = add_eos_for_other_targets
        self.shuffle = shuffle
        self.targets = list(targets) if targets else None
        self.add_bos_token = add_bos_token
        self.fixed_pad_length = fixed_pad_length
        self.pad_to_bsz = pad_to_bsz

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.targets is None:
            source, target = self.dataset[index], None
        else:
            source, target = self._source_and_target(*self.dataset[index])
        if self.add_bos_token:
            source = _after(self.vocab.bos(), source)
            if target is not None:
                target = _each(lambda t: _after(self.tgt_vocab.bos(), t), target)
        return {"id": index, "source": source, "target": target}

    def _source_and_target(self, source: Any, future: Any, past: Any) -> Any:
        targets = self.targets or ["future"]
        if (
            self.add_eos_for_other_targets
            and targets != ["future"]
            and source[-1] != self.vocab.eos()
        ):
            pad = source.new_tensor([self.vocab.pad()])
            past = torch.cat([pad, past[1:], source[-1:]])
            source = torch.cat([source, source.new_tensor([self.vocab.eos()])])
            future = torch.cat([future, pad])
        by_name = {"self": source, "future": future, "past": past}
        chosen = [by_name[name] for name in targets]
        target = chosen[0] if len(chosen) == 1 else chosen
        return source, _each(self._within_vocab, target)

    def _within_vocab(self, target: Any) -> Any:
        if len(self.tgt_vocab) == len(self.vocab):
            return target
        return target.masked_fill(target >= len(self.tgt_vocab), self.tgt_vocab.unk())

    def num_tokens_vec(self, indices: Any) -> Any:
        return self.sizes[indices]

    def ordered_indices(self) -> Any:
        """Return the indices by length; equal lengths in a random order with `shuffle`,
        else as they are."""
        n = len(self)
        order = np.random.permutation(n) if self.shuffle else np.arange(n)
        return np.lexsort([order, self.sizes])

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch as data.monolingual_dataset.collate makes it.

        Args:
            samples (list[dict[str, Any]]): As `__getitem__` returns them.
        """
        return collate(
            samples, self.vocab.pad(), self.vocab.eos(),
            self.fixed_pad_length, self.pad_to_bsz,
        )  # fmt: skip


def _after(word: int, tokens: Any) -> Any:
    return torch.cat([tokens.new_tensor([word]), tokens])


def _each(function: Any, target: Any) -> Any:
    """The function of a target, or of each of a list of them."""
    return list(map(function, target)) if isinstance(target, list) else function(target)
