"""A stream of tokens as blocks, by the name of data/token_block_dataset.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ctrainer import _C
from ctrainer.fairseq.data.base_wrapper_dataset import DatasetOverAnother
from ctrainer.fairseq.fairseq_dataset import SizedDataset


class TokenBlockDataset(SizedDataset, DatasetOverAnother):
    """Blocks of the items of `dataset`, one after another, cut by `break_mode`. The
    cuts are made in C.

    Args:
        dataset: Indexed by item, tensors of one dimension.
        sizes: Their lengths, (n,).
        block_size (int | None): Tokens of a block; None with break_mode "eos".
        pad, eos (int): The numbers of these words.
        break_mode (str | None, default None): "none" (None too) fills blocks,
            "complete" takes whole items, "complete_doc" whole items of one document,
            "eos" an item each; docs/how-to/fairseq_train.md has more.
        include_targets (bool, default False): An item is (source, target, past), the
            target being the block, the source the tokens before each of them, and past
            those before these; a block that begins an item has </s> before it, and
            <pad> before that.
        document_sep_len (int, default 1): The length of items that separate documents.

    Raises:
        ValueError: another break mode, or another number of sizes.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.data import TokenBlockDataset
        >>> rows = [torch.tensor([4, 5, 2]), torch.tensor([6, 2])]
        >>> blocks = TokenBlockDataset(rows, [3, 2], block_size=4, pad=1, eos=2)
        >>> [block.tolist() for block in blocks]
        [[4, 5, 2, 6], [2]]
    """

    def __init__(
        self,
        dataset: Any,
        sizes: Any,
        block_size: int | None,
        pad: int,
        eos: int,
        break_mode: str | None = None,
        include_targets: bool = False,
        document_sep_len: int = 1,
    ) -> None:
        if len(dataset) != len(sizes):
            raise ValueError(f"{len(dataset)} items with {len(sizes)} sizes")
        self.dataset = dataset
        self.pad, self.eos = pad, eos
        self.include_targets = include_targets
        rows = _C.token_blocks(
            np.ascontiguousarray(sizes, np.int64),
            break_mode or "none",
            0 if block_size is None else block_size,
            document_sep_len,
        )
        self._blocks = np.frombuffer(rows, np.int64).reshape(-1, 5)
        self.sizes = (self._blocks[:, 1] - self._blocks[:, 0]).astype(np.int32)

    @property
    def slice_indices(self) -> Any:
        """Where blocks begin and end in the stream: int64, (blocks, 2)."""
        return self._blocks[:, :2]

    @property
    def block_to_dataset_index(self) -> Any:
        """First item, position in it and last item of each block: int64, (blocks,
        3)."""
        return self._blocks[:, 2:]

    def __len__(self) -> int:
        return len(self._blocks)

    def attr(self, attr: str, index: int) -> Any:
        return self.dataset.attr(attr, int(self._blocks[index, 2]))

    def __getitem__(self, index: int) -> Any:
        start, end, first, offset, last = self._blocks[index].tolist()
        items = [self.dataset[i] for i in range(first, last + 1)]
        buffer = items[0] if len(items) == 1 else torch.cat(items)
        block = buffer[offset : offset + end - start]
        if not self.include_targets:
            return block
        before = block.new_tensor([self.pad, self.eos])
        context = torch.cat([before, buffer[: offset + end - start]])
        source = context[offset + 1 : offset + 1 + len(block)]
        return source, block, context[offset : offset + len(block)]

    def prefetch(self, indices: Any) -> None:
        """Announce to the items' data set those that these blocks touch.

        Args:
            indices: Of the blocks.
        """
        rows = self._blocks[np.asarray(indices, np.int64)]
        self.dataset.prefetch(
            sorted({i for row in rows.tolist() for i in range(row[2], row[4] + 1)})
        )
