"""The encoder of a transformer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ctrainer.fairseq.models import FairseqEncoder
from ctrainer.fairseq.modules import (
    FairseqDropout,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    TransformerEncoderLayer,
)

EncoderOut = dict[str, list[torch.Tensor]]


class Embedded(nn.Module):
    """The vectors of words and positions that enter an encoder or a decoder."""

    def _add_embedding(
        self, args: Any, words: nn.Embedding, dim: int, length: int, learned: bool
    ) -> None:
        """Add the modules, for sequences of up to `length` words."""
        self.register_buffer("version", torch.tensor([3.0]))
        self.dropout_module = FairseqDropout(args.dropout, type(self).__name__)
        self.padding_idx: Any = words.padding_idx
        self.embed_tokens, inputs = words, words.embedding_dim
        self.embed_scale = 1.0 if args.no_scale_embedding else math.sqrt(dim)
        self.project_in_dim = Linear(inputs, dim, bias=False) if inputs != dim else None
        self.embed_positions, self._length = None, length
        if not args.no_token_positional_embeddings:
            self.embed_positions = PositionalEmbedding(
                length, dim, self.padding_idx, learned
            )
        self.layernorm_embedding = LayerNorm(dim) if args.layernorm_embedding else None

    def forward_embedding(self, src_tokens: torch.Tensor) -> torch.Tensor:
        """Return vectors of words and their positions, (rows, length, dim).

        Args:
            src_tokens (torch.Tensor): (rows, length).
        """
        x = self.embed_scale * self.embed_tokens(src_tokens)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(src_tokens)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        dropped: torch.Tensor = self.dropout_module(x)
        return dropped

    def max_positions(self) -> int:
        """Return the greatest length of a sequence."""
        if self.embed_positions is None:
            return int(self._length)
        return int(min(self._length, self.embed_positions.max_positions))


class TransformerEncoder(Embedded, FairseqEncoder):
    """The encoder of a transformer.

    Args:
        args: The options of TransformerConfig as attributes.
        dictionary: Of the source.
        embed_tokens (nn.Embedding): Vectors of its words.
    """

    def __init__(self, args: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        dim, length = embed_tokens.embedding_dim, args.max_source_positions
        self._add_embedding(args, embed_tokens, dim, length, args.encoder_learned_pos)
        self.max_source_positions = length
        self.layers = nn.ModuleList(
            self.build_encoder_layer(args) for _ in range(args.encoder_layers)
        )
        self.num_layers = len(self.layers)
        self.layer_norm = LayerNorm(dim) if args.encoder_normalize_before else None

    def build_encoder_layer(self, args: Any) -> nn.Module:
        """Return a layer.

        Args:
            args: The options.
        """
        return TransformerEncoderLayer(args)

    def forward(
        self,
        src_tokens: torch.Tensor,
        src_lengths: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> EncoderOut:
        """Return what the decoder takes as encoder_out.

        Args:
            src_tokens (torch.Tensor): (rows, length).
            src_lengths (torch.Tensor | None, default None): (rows,).
            **kwargs: Not read.

        Returns:
            encoder_out: a list of one, (length, rows, dim); encoder_padding_mask:
            likewise (rows, length), empty where nothing is padded; encoder_embedding
            and src_lengths as in fairseq.
        """
        padding = src_tokens.eq(self.padding_idx)
        padded = bool(padding.any())
        embedded = self.forward_embedding(src_tokens)
        if padded:
            embedded = embedded.masked_fill(padding.unsqueeze(-1), 0.0)
        x = embedded.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding if padded else None)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding] if padded else [],
            "encoder_embedding": [embedded],
            "src_lengths": [src_tokens.ne(self.padding_idx).sum(1, keepdim=True)],
        }
