"""The transformer, by the names of fairseq's models/transformer."""

from ctrainer.fairseq.models.transformer.transformer_config import (
    DEFAULT_MAX_SOURCE_POSITIONS,
    DEFAULT_MAX_TARGET_POSITIONS,
    TransformerConfig,
)
from ctrainer.fairseq.models.transformer.transformer_decoder import TransformerDecoder
from ctrainer.fairseq.models.transformer.transformer_encoder import TransformerEncoder
from ctrainer.fairseq.models.transformer.transformer_model import (
    TransformerModel,
    base_architecture,
)
from ctrainer.fairseq.modules.small import Embedding, Linear

__all__ = [
    "DEFAULT_MAX_SOURCE_POSITIONS",
    "DEFAULT_MAX_TARGET_POSITIONS",
    "Embedding",
    "Linear",
    "TransformerConfig",
    "TransformerDecoder",
    "TransformerEncoder",
    "TransformerModel",
    "base_architecture",
]
