"""The base of decoders, by the name of fairseq's models/fairseq_decoder.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ctrainer.fairseq import utils


class FairseqDecoder(nn.Module):
    """Says of each position which word may follow."""

    def __init__(self, dictionary: Any) -> None:
        super().__init__()
        self.dictionary = dictionary

    def forward(
        self, prev_output_tokens: torch.Tensor, encoder_out: Any = None, **kwargs: Any
    ) -> Any:
        """(logits, dict of more) of the words before, (rows, length): logits are
        (rows, length, words)."""
        x, extra = self.extract_features(
            prev_output_tokens, encoder_out=encoder_out, **kwargs
        )
        return self.output_layer(x), extra

    def extract_features(
        self, prev_output_tokens: torch.Tensor, encoder_out: Any = None, **kwargs: Any
    ) -> Any:
        """(features, dict of more): features are (rows, length, dim)."""
        raise NotImplementedError

    def output_layer(self, features: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Logits of features."""
        raise NotImplementedError

    def get_normalized_probs(
        self, net_output: Any, log_probs: bool, sample: Any = None
    ) -> torch.Tensor:
        """Probabilities, or their logarithms, of what forward() returned; float32."""
        normalise = utils.log_softmax if log_probs else utils.softmax
        return normalise(net_output[0], dim=-1)

    def max_positions(self) -> int:
        """Words of a target at most."""
        return int(1e6)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> Any:
        """Bring an older state dict, whose keys begin with `name`, up to date."""
        return state_dict


class FairseqIncrementalDecoder(FairseqDecoder):
    """The base that fairseq gives to decoders that can go word by word. Training asks
    for all words at once."""
