"""The decoder of a transformer, which alone is a language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ctrainer.fairseq.models import FairseqIncrementalDecoder
from ctrainer.fairseq.models.transformer.transformer_encoder import Embedded
from ctrainer.fairseq.modules import LayerNorm, Linear, TransformerDecoderLayer


class TransformerDecoder(Embedded, FairseqIncrementalDecoder):
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
        dim, length = args.decoder_embed_dim, args.max_target_positions
        self._add_embedding(args, embed_tokens, dim, length, args.decoder_learned_pos)
        self.share_input_output_embed = args.share_decoder_input_output_embed
        self.embed_dim, self.output_embed_dim = dim, args.decoder_output_dim
        self.max_target_positions = length
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

    def extract_features(  # type: ignore[override]
        self,
        prev_output_tokens: torch.Tensor,
        encoder_out: Any = None,
        src_lengths: Any = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        source, source_padding = _of_encoder(encoder_out)
        padding = self._padding(prev_output_tokens)
        x = self.forward_embedding(prev_output_tokens).transpose(0, 1)
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
