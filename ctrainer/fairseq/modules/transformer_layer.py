"""Layers of a transformer, by the names and parameters of fairseq's
modules/transformer_layer.py. Tensors are (length, rows, embed_dim)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from ctrainer.fairseq.modules.multihead_attention import MultiheadAttention
from ctrainer.fairseq.modules.small import FairseqDropout, LayerNorm
from ctrainer.fairseq.utils import get_activation_fn

# fairseq 0.12.2 keeps the weights of an encoder's layer a second time, joined for a
# kernel of torch; it makes them anew from the others when it loads.
_COPIES = tuple(
    f"{part}_{kind}"
    for part in ("in_proj", "out_proj", "fc1", "fc2")
    for kind in ("weight", "bias")
)


class _Layer(nn.Module):
    """Attention to the sequence itself, the feed-forward network, and the norms, which
    stand before both or after them. side: "encoder" or "decoder", with which the names
    of its options begin."""

    # By the numbers that releases before 0.6 give them.
    norms: ClassVar[tuple[str, ...]]

    fc1: nn.Linear
    fc2: nn.Linear
    final_layer_norm: nn.LayerNorm

    def __init__(self, args: Any, side: str) -> None:
        super().__init__()
        self.embed_dim: int = getattr(args, f"{side}_embed_dim")
        self.normalize_before: bool = getattr(args, f"{side}_normalize_before")
        name = type(self).__name__
        self.dropout_module = FairseqDropout(args.dropout, module_name=name)
        inner = args.activation_dropout or getattr(args, "relu_dropout", 0.0) or 0.0
        self.activation_dropout_module = FairseqDropout(inner, module_name=name)
        self.activation_fn = get_activation_fn(args.activation_fn)
        self.self_attn = MultiheadAttention(
            self.embed_dim,
            getattr(args, f"{side}_attention_heads"),
            dropout=args.attention_dropout,
        )
        self.self_attn_layer_norm = LayerNorm(self.embed_dim)

    def _add_feed_forward(self, ffn_embed_dim: int) -> None:
        self.fc1 = nn.Linear(self.embed_dim, ffn_embed_dim)
        self.fc2 = nn.Linear(ffn_embed_dim, self.embed_dim)
        self.final_layer_norm = LayerNorm(self.embed_dim)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Bring a layer of an older release up to date, in place.

        Args:
            state_dict (dict[str, Any]): Tensors by name.
            name (str): With which the keys begin.
        """
        for copy in _COPIES:
            state_dict.pop(f"{name}.{copy}", None)
        for i, norm in enumerate(self.norms):
            for kind in ("weight", "bias"):
                old = f"{name}.layer_norms.{i}.{kind}"
                if old in state_dict:
                    state_dict[f"{name}.{norm}.{kind}"] = state_dict.pop(old)

    def _before(self, norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        return norm(x) if self.normalize_before else x

    def _after(
        self, norm: nn.LayerNorm, x: torch.Tensor, change: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.dropout_module(change)
        return x if self.normalize_before else norm(x)

    def _attended(
        self, attention: Any, norm: nn.LayerNorm, x: Any, source: Any, *masks: Any
    ) -> torch.Tensor:
        """x and the attention to a source, None for x itself."""
        seen = self._before(norm, x)
        source = seen if source is None else source
        change, _ = attention(seen, source, source, *masks)
        return self._after(norm, x, change)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.activation_fn(self.fc1(self._before(self.final_layer_norm, x)))
        change = self.fc2(self.activation_dropout_module(inner))
        return self._after(self.final_layer_norm, x, change)


class TransformerEncoderLayer(_Layer):
    """Attention to all words of the source, and a feed-forward network.

    Args:
        args: encoder_embed_dim, encoder_ffn_embed_dim, encoder_attention_heads,
            encoder_normalize_before, dropout, attention_dropout, activation_dropout and
            activation_fn as attributes.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.models.transformer import TransformerConfig
        >>> from ctrainer.fairseq.modules import TransformerEncoderLayer
        >>> layer = TransformerEncoderLayer(TransformerConfig())
        >>> layer(torch.zeros(3, 1, 512), None).shape
        torch.Size([3, 1, 512])
    """

    norms = ("self_attn_layer_norm", "final_layer_norm")

    def __init__(self, args: Any) -> None:
        super().__init__(args, "encoder")
        self._add_feed_forward(args.encoder_ffn_embed_dim)

    def forward(
        self,
        x: torch.Tensor,
        encoder_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output, (length, rows, dim).

        Args:
            x (torch.Tensor): (length, rows, dim).
            encoder_padding_mask (torch.Tensor | None): (rows, length), true for
                padding.
            attn_mask (torch.Tensor | None, default None): (length, length), true or
                -inf where nothing is to be seen.
        """
        norm, masks = self.self_attn_layer_norm, (encoder_padding_mask, attn_mask)
        x = self._attended(self.self_attn, norm, x, None, *masks)
        return self._feed_forward(x)


class TransformerDecoderLayer(_Layer):
    """Attention to the words before, to the source unless no_encoder_attn, and a
    feed-forward network.

    Args:
        args: As TransformerEncoderLayer's, of the decoder, and encoder_embed_dim for
            the source's.
        no_encoder_attn (bool, default False): Without attention to a source.

    Example:
        >>> from ctrainer.fairseq.modules import TransformerDecoderLayer
        >>> TransformerDecoderLayer.norms[-1]
        'final_layer_norm'
    """

    norms = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")

    def __init__(self, args: Any, no_encoder_attn: bool = False) -> None:
        super().__init__(args, "decoder")
        heads, dropout = args.decoder_attention_heads, args.attention_dropout
        self.encoder_attn: MultiheadAttention | None = None
        if not no_encoder_attn:
            source = args.encoder_embed_dim
            self.encoder_attn = MultiheadAttention(
                self.embed_dim, heads, source, source, dropout
            )
            self.encoder_attn_layer_norm = LayerNorm(self.embed_dim)
        self._add_feed_forward(args.decoder_ffn_embed_dim)

    def forward(
        self,
        x: torch.Tensor,
        encoder_out: torch.Tensor | None = None,
        encoder_padding_mask: torch.Tensor | None = None,
        self_attn_mask: torch.Tensor | None = None,
        self_attn_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None, None]:
        """Return (output, None, None), where fairseq has weights of attention.

        Args:
            x (torch.Tensor): (length, rows, dim).
            encoder_out (torch.Tensor | None, default None): (source length, rows, dim).
            encoder_padding_mask (torch.Tensor | None, default None): (rows, source
                length), true for padding.
            self_attn_mask (torch.Tensor | None, default None): (length, length), true
                or -inf where nothing is to be seen.
            self_attn_padding_mask (torch.Tensor | None, default None): (rows, length),
                true for padding.
            is_causal (bool, default False): A position sees itself and those before it.
        """
        norm, masks = (
            self.self_attn_layer_norm,
            (self_attn_padding_mask, self_attn_mask),
        )
        x = self._attended(self.self_attn, norm, x, None, *masks, is_causal)
        if self.encoder_attn is not None and encoder_out is not None:
            norm, mask = self.encoder_attn_layer_norm, encoder_padding_mask
            x = self._attended(self.encoder_attn, norm, x, encoder_out, mask)
        return self._feed_forward(x), None, None
