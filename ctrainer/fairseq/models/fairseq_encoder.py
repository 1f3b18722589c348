"""The base of encoders, by the name of fairseq's models/fairseq_encoder.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class FairseqEncoder(nn.Module):
    """Makes of source words what a decoder attends to."""

    def __init__(self, dictionary: Any) -> None:
        super().__init__()
        self.dictionary = dictionary

    def forward(
        self, src_tokens: torch.Tensor, src_lengths: Any = None, **kwargs: Any
    ) -> Any:
        """src_tokens: (rows, length); src_lengths: (rows,)."""
        raise NotImplementedError

    def max_positions(self) -> int:
        """Words of a source at most."""
        return int(1e6)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> Any:
        """Bring an older state dict, whose keys begin with `name`, up to date."""
        return state_dict

    def set_num_updates(self, num_updates: int) -> None:
        """Is told the number of updates before each."""
