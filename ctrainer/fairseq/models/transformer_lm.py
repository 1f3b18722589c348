"""The transformer as a language model, by the name of models/transformer_lm.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctrainer.fairseq.config.base import II
from ctrainer.fairseq.models import (
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from ctrainer.fairseq.models.transformer import (
    DEFAULT_MAX_TARGET_POSITIONS,
    Embedding,
    TransformerDecoder,
)
from ctrainer.fairseq.models.transformer.transformer_config import (
    SharedConfig,
    defaults,
)


@dataclass
class TransformerLanguageModelConfig(SharedConfig):
    """Options of `transformer_lm`."""

    add_bos_token: bool = II("task.add_bos_token")
    tokens_per_sample: int = II("task.tokens_per_sample")


@register_model("transformer_lm", dataclass=TransformerLanguageModelConfig)
class TransformerLanguageModel(FairseqLanguageModel):
    """A decoder without a source, whose norms stand before its layers' halves."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """decoder_normalize_before is set, as in fairseq, without which training is
        not stable."""
        args.decoder_normalize_before = True
        if args.max_target_positions is None:
            args.max_target_positions = getattr(
                args, "tokens_per_sample", DEFAULT_MAX_TARGET_POSITIONS
            )
        words = cls.build_embedding(
            args, task.source_dictionary, args.decoder_input_dim
        )
        return cls(
            TransformerDecoder(
                args, task.target_dictionary, words, no_encoder_attn=True
            )
        )

    @classmethod
    def build_embedding(cls, args: Any, dictionary: Any, embed_dim: int) -> Any:
        return Embedding(len(dictionary), embed_dim, dictionary.pad())


def _gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "decoder_embed_dim": width,
        "decoder_ffn_embed_dim": 4 * width,
        "decoder_layers": layers,
        "decoder_attention_heads": heads,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_fn": "gelu",
    }


_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer_lm_big": {
        "decoder_layers": 12,
        "decoder_embed_dim": 1024,
        "decoder_ffn_embed_dim": 4096,
        "decoder_attention_heads": 16,
    },
    "transformer_lm_gpt": _gpt(768, 12, 12),
    "transformer_lm_gpt2_small": _gpt(1024, 24, 16),
    "transformer_lm_gpt2_medium": _gpt(1280, 36, 20),
    "transformer_lm_gpt2_big": _gpt(1600, 48, 25),
    "transformer_lm_gpt2_tiny": {**_gpt(64, 2, 1), "decoder_ffn_embed_dim": 64},
}
for _name, _values in _ARCHITECTURES.items():
    register_model_architecture("transformer_lm", _name)(defaults(_values))
