"""The encoder-decoder `transformer` and its architectures."""

from __future__ import annotations

from typing import Any

from ctrainer.fairseq.models import (
    FairseqEncoderDecoderModel,
    register_model,
    register_model_architecture,
)
from ctrainer.fairseq.models.transformer.transformer_config import (
    DEFAULT_MAX_SOURCE_POSITIONS,
    DEFAULT_MAX_TARGET_POSITIONS,
    TransformerConfig,
    defaults,
)
from ctrainer.fairseq.models.transformer.transformer_decoder import TransformerDecoder
from ctrainer.fairseq.models.transformer.transformer_encoder import TransformerEncoder
from ctrainer.fairseq.modules import Embedding


@register_model("transformer", dataclass=TransformerConfig)
class TransformerModel(FairseqEncoderDecoderModel):
    """The transformer of translation.

    Args:
        args: The options of TransformerConfig as attributes.
        encoder: A TransformerEncoder.
        decoder: A TransformerDecoder.

    Source: Vaswani and others, "Attention Is All You Need", 2017.
    """

    def __init__(self, args: Any, encoder: Any, decoder: Any) -> None:
        super().__init__(encoder, decoder)
        self.args = args

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Return a new model for a task.

        Args:
            args: The options of TransformerConfig as attributes.
            task: With source_dictionary and target_dictionary.

        Raises:
            ValueError: embeddings cannot be shared as asked.
        """
        if args.max_source_positions is None:
            args.max_source_positions = DEFAULT_MAX_SOURCE_POSITIONS
        if args.max_target_positions is None:
            args.max_target_positions = DEFAULT_MAX_TARGET_POSITIONS
        source, target = task.source_dictionary, task.target_dictionary
        source_words = cls.build_embedding(args, source, args.encoder_embed_dim)
        if args.share_all_embeddings:
            _check_sharing(args, source, target)
            args.share_decoder_input_output_embed = True
            target_words = source_words
        else:
            target_words = cls.build_embedding(args, target, args.decoder_input_dim)
        encoder = cls.build_encoder(args, source, source_words)
        return cls(args, encoder, cls.build_decoder(args, target, target_words))

    @classmethod
    def build_embedding(cls, args: Any, dictionary: Any, embed_dim: int) -> Any:
        """Return vectors of words.

        Args:
            args: The options.
            dictionary: The words.
            embed_dim (int): Width.
        """
        return Embedding(len(dictionary), embed_dim, dictionary.pad())

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Any, embed_tokens: Any) -> Any:
        """Return the encoder.

        Args:
            args: The options.
            src_dict: Of the source.
            embed_tokens: Vectors of its words.
        """
        return TransformerEncoder(args, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Any, embed_tokens: Any) -> Any:
        """Return the decoder.

        Args:
            args: The options.
            tgt_dict: Of the target.
            embed_tokens: Vectors of its words.
        """
        return TransformerDecoder(args, tgt_dict, embed_tokens)


def _check_sharing(args: Any, source: Any, target: Any) -> None:
    if source != target:
        raise ValueError("--share-all-embeddings requires a joined dictionary")
    if args.encoder_embed_dim != args.decoder_input_dim:
        raise ValueError(
            "--share-all-embeddings requires --encoder-embed-dim to match "
            "--decoder-embed-dim"
        )


_BIG = {
    "encoder_embed_dim": 1024,
    "encoder_ffn_embed_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_embed_dim": 1024,
    "decoder_ffn_embed_dim": 4096,
    "decoder_attention_heads": 16,
    "dropout": 0.3,
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer_tiny": {
        "encoder_embed_dim": 64,
        "encoder_ffn_embed_dim": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
    },
    "transformer_iwslt_de_en": {
        "encoder_embed_dim": 512,
        "encoder_ffn_embed_dim": 1024,
        "encoder_attention_heads": 4,
        "decoder_embed_dim": 512,
        "decoder_ffn_embed_dim": 1024,
        "decoder_attention_heads": 4,
    },
    "transformer_wmt_en_de": {},
    "transformer_vaswani_wmt_en_de_big": _BIG,
    "transformer_vaswani_wmt_en_fr_big": {**_BIG, "dropout": 0.1},
    "transformer_wmt_en_de_big": {**_BIG, "attention_dropout": 0.1},
}
for _name, _values in _ARCHITECTURES.items():
    register_model_architecture("transformer", _name)(defaults(_values))


def base_architecture(args: Any) -> None:
    """Complete options with TransformerConfig's defaults, as functions that register an
    architecture of their own do last.

    Args:
        args: The options as attributes.
    """
    encoder = TransformerConfig()
    lacking = {k: v for k, v in vars(encoder).items() if not str(v).startswith("${")}
    defaults({k: v for k, v in lacking.items() if k[:1] != "_"})(args)
    defaults(
        {
            "decoder_embed_dim": args.encoder_embed_dim,
            "decoder_ffn_embed_dim": args.encoder_ffn_embed_dim,
        }
    )(args)
    defaults(
        {
            "decoder_input_dim": args.decoder_embed_dim,
            "decoder_output_dim": args.decoder_embed_dim,
        }
    )(args)
