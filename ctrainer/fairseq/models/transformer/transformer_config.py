"""The options of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ctrainer.arguments.docstrings import compose, options
from ctrainer.fairseq.config.base import II, FairseqDataclass, opt

DEFAULT_MAX_SOURCE_POSITIONS = 1024
DEFAULT_MAX_TARGET_POSITIONS = 1024

Activation = Literal[
    "gelu",
    "gelu_accurate",
    "gelu_fast",
    "linear",
    "relu",
    "relu_squared",
    "swish",
    "tanh",
]


@dataclass
class SharedConfig(FairseqDataclass):
    """Options of language models and translation models."""

    activation_fn: Activation = opt("relu", "Function of the feed-forward networks.")
    dropout: float = opt(0.1, "Dropout of a layer's output.")
    attention_dropout: float = opt(0.0, "Dropout of attention's weights.")
    activation_dropout: float = opt(0.0, "Dropout within the feed-forward networks.")
    relu_dropout: float = opt(0.0, "The old name of activation_dropout.")
    decoder_embed_dim: int = opt(512, "Width of the decoder.")
    decoder_output_dim: int = opt(
        II("model.decoder_embed_dim"), "Width of the decoder's output."
    )
    decoder_input_dim: int = opt(
        II("model.decoder_embed_dim"), "Width of the decoder's input."
    )
    decoder_ffn_embed_dim: int = opt(2048, "Width within the feed-forward networks.")
    decoder_layers: int = opt(6, "Layers of the decoder.")
    decoder_attention_heads: int = opt(8, "Heads of the decoder's attention.")
    decoder_normalize_before: bool = opt(
        False, "Norms stand before a layer's halves, not after them."
    )
    decoder_learned_pos: bool = opt(False, "Learn the positions' vectors.")
    no_decoder_final_norm: bool = opt(
        False, "No norm after the last layer where norms stand before."
    )
    no_token_positional_embeddings: bool = opt(False, "Words have no positions.")
    share_decoder_input_output_embed: bool = opt(
        False, "Input and output words have the same vectors."
    )
    layernorm_embedding: bool = opt(False, "A norm after the words' vectors.")
    no_scale_embedding: bool = opt(
        False, "Do not multiply the words' vectors by the root of the width."
    )
    max_target_positions: int | None = II("task.max_target_positions")


@dataclass
class TransformerConfig(SharedConfig):
    """Options of `transformer`."""

    encoder_embed_dim: int = opt(512, "Width of the encoder.")
    encoder_ffn_embed_dim: int = opt(2048, "Width within its feed-forward networks.")
    encoder_layers: int = opt(6, "Layers of the encoder.")
    encoder_attention_heads: int = opt(8, "Heads of its attention.")
    encoder_normalize_before: bool = opt(
        False, "Norms stand before a layer's halves, not after them."
    )
    encoder_learned_pos: bool = opt(False, "Learn the positions' vectors.")
    decoder_embed_dim: int = opt(
        II("model.encoder_embed_dim"), "Width of the decoder; by default the encoder's."
    )
    decoder_ffn_embed_dim: int = opt(
        II("model.encoder_ffn_embed_dim"),
        "Width within its feed-forward networks; by default as the encoder's.",
    )
    share_all_embeddings: bool = opt(
        False, "Source, target and output words have the same vectors."
    )
    max_source_positions: int | None = II("task.max_source_positions")


def defaults(values: Mapping[str, Any]) -> Callable[[Any], None]:
    """A function that sets those of `values` that the options it is given lack."""

    def complete(args: Any) -> None:
        for name, value in values.items():
            if not hasattr(args, name):
                setattr(args, name, value)

    return complete


compose(TransformerConfig, partial(options, TransformerConfig))
