"""Layers of fairseq's transformers, with its names and parameters."""

from ctrainer.fairseq.modules.multihead_attention import MultiheadAttention
from ctrainer.fairseq.modules.positional_embedding import (
    LearnedPositionalEmbedding,
    PositionalEmbedding,
    SinusoidalPositionalEmbedding,
)
from ctrainer.fairseq.modules.small import (
    Embedding,
    FairseqDropout,
    LayerNorm,
    Linear,
)
from ctrainer.fairseq.modules.transformer_layer import (
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)

__all__ = [
    "Embedding",
    "FairseqDropout",
    "LayerNorm",
    "LearnedPositionalEmbedding",
    "Linear",
    "MultiheadAttention",
    "PositionalEmbedding",
    "SinusoidalPositionalEmbedding",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]
