"""The base of decoders that go word by word, by the name of fairseq's module."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer.fairseq.models.fairseq_decoder import FairseqDecoder


class FairseqIncrementalDecoder(FairseqDecoder):
    """Given a dict as incremental_state, forward() answers for the last word alone and
    keeps in it what it needs of those before."""

    def forward(
        self,
        prev_output_tokens: torch.Tensor,
        encoder_out: Any = None,
        incremental_state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As FairseqDecoder's; with incremental_state, logits are (rows, 1, words)."""
        raise NotImplementedError

    def reorder_incremental_state(
        self, incremental_state: dict[str, Any], new_order: torch.Tensor
    ) -> None:
        """Keep the rows new_order, as a beam search asks."""

    def reorder_incremental_state_scripting(
        self, incremental_state: dict[str, Any], new_order: torch.Tensor
    ) -> None:
        """Tell every module within that has reorder_incremental_state()."""
        for module in self.modules():
            reorder: Any = getattr(module, "reorder_incremental_state", None)
            if module is not self and reorder is not None:
                reorder(incremental_state, new_order)

    def set_beam_size(self, beam_size: int) -> None:
        """Is told the width of a beam search."""
