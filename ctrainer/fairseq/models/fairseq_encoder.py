"""The base of encoders, by the name of fairseq's models/fairseq_encoder.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class OverDictionary(nn.Module):
    """The base of encoders and decoders: the dictionary of the words."""

    def __init__(self, dictionary: Any) -> None:
        super().__init__()
        self.dictionary = dictionary

    def max_positions(self) -> int:
        """Return the greatest number of words in a sequence."""
        return int(1e6)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> Any:
        """Bring an older state dict up to date, and return it.

        Args:
            state_dict (dict[str, Any]): Tensors by name.
            name (str): With which the keys begin.
        """
        return state_dict


class FairseqEncoder(OverDictionary):
    """Encodes source words for a decoder's attention.

    Args:
        dictionary: Of the source.

    Example:
        >>> from ctrainer.fairseq.models import FairseqEncoder
        >>> FairseqEncoder(dictionary=None).max_positions()
        1000000
    """

    def forward(
        self, src_tokens: torch.Tensor, src_lengths: Any = None, **kwargs: Any
    ) -> Any:
        """Return what the decoder takes as encoder_out.

        Args:
            src_tokens (torch.Tensor): (rows, length).
            src_lengths (default None): (rows,).
            **kwargs: Of subclasses.
        """
        raise NotImplementedError

    def set_num_updates(self, num_updates: int) -> None:
        """Take in the number of updates before each.

        Args:
            num_updates (int): Updates done.
        """
