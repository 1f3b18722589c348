"""The base of decoders, by the name of fairseq's models/fairseq_decoder.py."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer.fairseq import utils
from ctrainer.fairseq.models.fairseq_encoder import OverDictionary


class FairseqDecoder(OverDictionary):
    """Predicts for each position which word may follow.

    Args:
        dictionary: Of the target.

    Example:
        >>> from ctrainer.fairseq.models import FairseqDecoder
        >>> FairseqDecoder(dictionary=None).max_positions()
        1000000
    """

    def forward(
        self, prev_output_tokens: torch.Tensor, encoder_out: Any = None, **kwargs: Any
    ) -> Any:
        """Return (logits, dict of more); logits are (rows, length, words).

        Args:
            prev_output_tokens (torch.Tensor): The words before, (rows, length).
            encoder_out (default None): What the encoder returned.
            **kwargs: Of extract_features().
        """
        x, extra = self.extract_features(
            prev_output_tokens, encoder_out=encoder_out, **kwargs
        )
        return self.output_layer(x), extra

    def extract_features(
        self, prev_output_tokens: torch.Tensor, encoder_out: Any = None, **kwargs: Any
    ) -> Any:
        """Return (features, dict of more); features are (rows, length, dim).

        Args:
            prev_output_tokens (torch.Tensor): The words before, (rows, length).
            encoder_out (default None): What the encoder returned.
            src_lengths: Lengths of the sources, (rows,).
            **kwargs: Of subclasses.
        """
        raise NotImplementedError

    def output_layer(self, features: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return logits of features.

        Args:
            features (torch.Tensor): (rows, length, dim).
            **kwargs: Of subclasses.
        """
        raise NotImplementedError

    def get_normalized_probs(
        self, net_output: Any, log_probs: bool, sample: Any = None
    ) -> torch.Tensor:
        """Return probabilities, or their logarithms, float32.

        Args:
            net_output: What forward() returned.
            log_probs (bool): Return logarithms.
            sample (default None): The batch.
        """
        normalise = utils.log_softmax if log_probs else utils.softmax
        return normalise(net_output[0], dim=-1)


class FairseqIncrementalDecoder(FairseqDecoder):
    """The base that fairseq gives to decoders that can go word by word. Training asks
    for all words at once."""
