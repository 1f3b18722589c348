"""Attention of several heads, over torch's fused kernels, with fairseq's parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class MultiheadAttention(nn.Module):
    """softmax(q k' / sqrt(head_dim)) v for each head, projected.

    Args:
        embed_dim (int): Of queries and outputs, divisible by num_heads.
        num_heads (int): Heads.
        kdim, vdim (int | None, default None): Of keys and values; None: embed_dim.
        dropout (float, default 0.0): Of the weights, while training.
        bias (bool, default True): Have biases in the projections.

    Raises:
        ValueError: the heads do not divide embed_dim.

    Source: Vaswani and others, "Attention Is All You Need", 2017, part 3.2; parameters'
    names and initial values as in fairseq, modules/multihead_attention.py.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.modules import MultiheadAttention
        >>> x = torch.zeros(3, 1, 8)
        >>> MultiheadAttention(8, 2)(x, x, x)[0].shape
        torch.Size([3, 1, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads != 0:
            raise ValueError(
                f"embed_dim {embed_dim} is not divisible by {num_heads} heads"
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        same = (kdim or embed_dim) == (vdim or embed_dim) == embed_dim
        self._reset_parameters(1 / math.sqrt(2) if same else 1.0)

    def _reset_parameters(self, gain: float) -> None:
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=gain)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Divide the projections that releases before 0.9 have in one.

        Args:
            state_dict (dict[str, Any]): Tensors by name.
            name (str): With which the keys begin.
        """
        for kind in ("weight", "bias"):
            joined = state_dict.pop(f"{name}.in_proj_{kind}", None)
            if joined is not None:
                for part, values in zip("qkv", joined.chunk(3), strict=True):
                    state_dict[f"{name}.{part}_proj.{kind}"] = values

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Return (output of query's shape, None: the fused kernels return no weights).

        Args:
            query (torch.Tensor): (target length, rows, embed_dim).
            key, value (torch.Tensor): Likewise, of the source's length.
            key_padding_mask (torch.Tensor | None, default None): (rows, source length),
                true where nothing is to be seen.
            attn_mask (torch.Tensor | None, default None): (target, source), true or
                -inf there.
            is_causal (bool, default False): A position sees itself and those before it,
                without a mask being made.
        """
        q = self._heads(self.q_proj(query))
        k, v = self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        mask = _joined(key_padding_mask, attn_mask, q, k, is_causal)
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, mask, p, is_causal and mask is None
        )
        joined = out.permute(2, 0, 1, 3).reshape(query.shape)
        return self.out_proj(joined), None

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(length, rows, embed_dim) as (rows, heads, length, head_dim)."""
        length, rows, _ = x.shape
        return x.view(length, rows, self.num_heads, self.head_dim).permute(1, 2, 0, 3)


def _joined(
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    is_causal: bool,
) -> torch.Tensor | None:
    """What may be seen: (rows or 1, 1, target, source) of booleans, or None for what
    is_causal alone says."""
    if key_padding_mask is None and attn_mask is None:
        return None
    seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None:
        hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask < 0
        seen = seen & ~hidden
    if key_padding_mask is None:
        return seen[None, None]
    both = seen & ~key_padding_mask.bool()[:, None, None, :]
    if not is_causal:
        return both
    # A word of padding sees itself: a row of nothing would have no softmax.
    return both | torch.eye(q.size(2), dtype=torch.bool, device=q.device)
