"""Attention of several heads, over torch's fused kernels, with fairseq's parameters."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Saved = dict[str, torch.Tensor | None]
_instances = itertools.count()


class MultiheadAttention(nn.Module):
    """softmax(q k' / sqrt(head_dim)) v for each head, projected.

    embed_dim: of queries and outputs, divisible by num_heads. kdim, vdim: of keys and
    values; embed_dim unless given. dropout: of the weights, while training.

    Source: Vaswani and others, Attention Is All You Need (2017), part 3.2; parameters'
    names and initial values as in fairseq, modules/multihead_attention.py.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads != 0:
            raise ValueError(
                f"embed_dim {embed_dim} is not divisible by {num_heads} heads"
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        same = (kdim or embed_dim) == (vdim or embed_dim) == embed_dim
        self._reset_parameters(1 / math.sqrt(2) if same else 1.0)
        self._key = f"attention.{next(_instances)}"

    def _reset_parameters(self, gain: float) -> None:
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=gain)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Releases before 0.9 have the three projections in one."""
        for kind in ("weight", "bias"):
            joined = state_dict.pop(f"{name}.in_proj_{kind}", None)
            if joined is not None:
                for part, values in zip("qkv", joined.chunk(3), strict=True):
                    state_dict[f"{name}.{part}_proj.{kind}"] = values

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None = None,
        incremental_state: dict[str, Saved] | None = None,
        need_weights: bool = False,
        static_kv: bool = False,
        attn_mask: torch.Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output of query's shape, weights or None).

        query: (target length, rows, embed_dim), key and value alike, of the source's
        length. key_padding_mask: (rows, source length), true where nothing is to be
        seen. attn_mask: (target, source), true or -inf there. is_causal: a position
        sees itself and those before it, without a mask being made.
        incremental_state: keeps keys and values from call to call; with static_kv
        those of the first call stay.

        need_weights: return them too, averaged over heads, (rows, target, source), or
        with need_head_weights each head's, (heads, rows, target, source). Slower.
        """
        if before_softmax:
            raise ValueError("before_softmax: the fused kernels have no such value")
        q = self._heads(self.q_proj(query))
        k, v = self._keys_and_values(key, value, incremental_state, static_kv)
        mask = _joined(key_padding_mask, attn_mask, q, k, is_causal)
        if need_weights or need_head_weights:
            return self._with_weights(q, k, v, mask, need_head_weights)
        p = self.dropout if self.training else 0.0
        alone = is_causal and mask is None and q.size(2) > 1
        out = F.scaled_dot_product_attention(q, k, v, mask, p, alone)
        return self._joined_heads(out), None

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(length, rows, embed_dim) as (rows, heads, length, head_dim)."""
        length, rows, _ = x.shape
        return x.view(length, rows, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def _joined_heads(self, x: torch.Tensor) -> torch.Tensor:
        rows, _, length, _ = x.shape
        joined = x.permute(2, 0, 1, 3).reshape(length, rows, self.embed_dim)
        output: torch.Tensor = self.out_proj(joined)
        return output

    def _keys_and_values(
        self,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        incremental_state: dict[str, Saved] | None,
        static_kv: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        saved = (
            {} if incremental_state is None else incremental_state.get(self._key, {})
        )
        k, v = saved.get("prev_key"), saved.get("prev_value")
        if not (static_kv and k is not None and v is not None):
            if key is None or value is None:
                raise ValueError("attention without keys and values, and none are kept")
            new_k, new_v = (
                self._heads(self.k_proj(key)),
                self._heads(self.v_proj(value)),
            )
            if static_kv or k is None or v is None:
                k, v = new_k, new_v
            else:
                k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
        if incremental_state is not None:
            incremental_state[self._key] = {"prev_key": k, "prev_value": v}
        return k, v

    def _with_weights(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        each_head: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (q @ k.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32)
        used = F.dropout(weights.to(v), self.dropout, self.training)
        shown = weights.transpose(0, 1)
        return self._joined_heads(used @ v), shown if each_head else shown.mean(0)

    def reorder_incremental_state(
        self, incremental_state: dict[str, Saved], new_order: torch.Tensor
    ) -> dict[str, Saved]:
        """Keep the rows new_order, as a beam search asks."""
        saved: dict[str, Any] = incremental_state.get(self._key, {})
        incremental_state[self._key] = {
            name: rows.index_select(0, new_order) for name, rows in saved.items()
        }
        return incremental_state


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
        # Fewer queries than keys: one new word after those that were kept.
        return None
    seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device)
    if is_causal:
        seen = seen.tril(k.size(2) - q.size(2))
    if attn_mask is not None:
        hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask < 0
        seen = seen & ~hidden
    if key_padding_mask is None:
        return seen[None, None]
    both = seen & ~key_padding_mask.bool()[:, None, None, :]
    if q.size(2) != k.size(2) or not is_causal:
        return both
    # A word of padding sees itself: a row of nothing would have no softmax.
    return both | torch.eye(q.size(2), dtype=torch.bool, device=q.device)
