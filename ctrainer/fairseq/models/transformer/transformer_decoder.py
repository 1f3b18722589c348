"""The decoder of a transformer, which alone is a language model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ctrainer.fairseq.models import FairseqIncrementalDecoder
from ctrainer.fairseq.modules import (
    FairseqDropout,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    TransformerDecoderLayer,
)


class TransformerDecoder(FairseqIncrementalDecoder):
    """The decoder of a transformer.

    Args:
        args: The options of TransformerConfig as attributes, those of the encoder only
            where no_encoder_attn is False.
        dictionary: Of the target.
        embed_tokens (nn.Embedding): Vectors of its words.
        no_encoder_attn (bool, default False): Without attention to a source.
        output_projection (nn.Module | None, default None): Makes logits; None: one is
            made.
    """

    def __init__(
        self,
        args: Any,
        dictionary: Any,
        embed_tokens: nn.Embedding,
        no_encoder_attn: bool = False,
        output_projection: nn.Module | None = None,
    ) -> None:
        super().__init__(dictionary)
        self.register_buffer("version", torch.tensor([3.0]))
        self.dropout_module = FairseqDropout(args.dropout, type(self).__name__)
        self.share_input_output_embed = args.share_decoder_input_output_embed
        dim, inputs = args.decoder_embed_dim, embed_tokens.embedding_dim
        self.embed_dim, self.output_embed_dim = dim, args.decoder_output_dim
        self.padding_idx: Any = embed_tokens.padding_idx
        self.max_target_positions = args.max_target_positions
        self.embed_tokens = embed_tokens
        self.embed_scale = 1.0 if args.no_scale_embedding else math.sqrt(dim)
        self.project_in_dim = Linear(inputs, dim, bias=False) if inputs != dim else None
        self.embed_positions = None
        if not args.no_token_positional_embeddings:
            self.embed_positions = PositionalEmbedding(
                self.max_target_positions, dim, self.padding_idx,
                learned=args.decoder_learned_pos,
            )  # fmt: skip
        self.layernorm_embedding = LayerNorm(dim) if args.layernorm_embedding else None
        self.layers = nn.ModuleList(
            self.build_decoder_layer(args, no_encoder_attn)
            for _ in range(args.decoder_layers)
        )
        self.num_layers = len(self.layers)
        final_norm = args.decoder_normalize_before and not args.no_decoder_final_norm
        self.layer_norm = LayerNorm(dim) if final_norm else None
        self.project_out_dim = None
        if dim != self.output_embed_dim:
            self.project_out_dim = Linear(dim, self.output_embed_dim, bias=False)
        self.output_projection = output_projection or self._projection(dictionary)

    def _projection(self, dictionary: Any) -> nn.Module:
        words, dim = len(dictionary), self.output_embed_dim
        if not self.share_input_output_embed:
            made = nn.Linear(dim, words, bias=False)
            nn.init.normal_(made.weight, mean=0, std=dim**-0.5)
            return made
        vectors = self.embed_tokens.weight
        if tuple(vectors.shape) != (words, dim):
            raise ValueError(
                f"share_decoder_input_output_embed: input words are {len(vectors)} "
                f"vectors of {vectors.size(1)}, output words {words} of {dim}; set "
                "decoder_input_dim and decoder_output_dim to the same, without an "
                "output_dictionary_size"
            )
        shared = nn.Linear(dim, words, bias=False)
        shared.weight = vectors
        return shared

    def build_decoder_layer(self, args: Any, no_encoder_attn: bool = False) -> Any:
        """Return a layer.

        Args:
            args: The options.
            no_encoder_attn (bool, default False): Without attention to a source.
        """
        return TransformerDecoderLayer(args, no_encoder_attn)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_scale * self.embed_tokens(tokens)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        dropped: torch.Tensor = self.dropout_module(x)
        return dropped

    def extract_features(  # type: ignore[override]
        self,
        prev_output_tokens: torch.Tensor,
        encoder_out: Any = None,
        src_lengths: Any = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        source, source_padding = _of_encoder(encoder_out)
        padding = self._padding(prev_output_tokens)
        x = self._embedded(prev_output_tokens).transpose(0, 1)
        states = [x]
        for layer in self.layers:
            x, _, _ = layer(
                x, source, source_padding,
                self_attn_padding_mask=padding, is_causal=True,
            )  # fmt: skip
            states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, {"attn": [None], "inner_states": states}

    def _padding(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Where padding is, if words see any: they see those before them, so none do
        where it comes last, and torch has its fastest kernel then."""
        padding = tokens.eq(self.padding_idx)
        return padding if bool((padding[:, :-1] & ~padding[:, 1:]).any()) else None

    def output_layer(self, features: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.output_projection(features)
        return logits

    def max_positions(self) -> int:
        if self.embed_positions is None:
            return int(self.max_target_positions)
        return int(min(self.max_target_positions, self.embed_positions.max_positions))

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> Any:
        """Bring an older state dict, without output_projection, up to date, and return
        it.

        Args:
            state_dict (dict[str, Any]): Tensors by name.
            name (str): With which the keys begin.
        """
        wanted = f"{name}.output_projection.weight"
        shared = self.share_input_output_embed
        old = f"{name}.{'embed_tokens.weight' if shared else 'embed_out'}"
        if wanted not in state_dict and old in state_dict:
            state_dict[wanted] = state_dict[old] if shared else state_dict.pop(old)
        return state_dict


def _of_encoder(
    encoder_out: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(output, padding) of an encoder, None where there is none."""
    if encoder_out is None:
        return None, None
    output, padding = encoder_out["encoder_out"], encoder_out["encoder_padding_mask"]
    return (output[0] if output else None), (padding[0] if padding else None)
