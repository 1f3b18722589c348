"""The positions of words as vectors: learnt ones, or waves."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from ctrainer.fairseq.modules.small import drawn
from ctrainer.fairseq.utils import make_positions

_MOST = 100_000


class LearnedPositionalEmbedding(nn.Embedding):
    """A vector to learn for each position, from padding_idx + 1.

    Args:
        num_embeddings (int): Positions, those up to padding_idx included.
        embedding_dim (int): Width.
        padding_idx (int | None): The number of padding; None: none.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.modules import LearnedPositionalEmbedding
        >>> LearnedPositionalEmbedding(8, 4, 1)(torch.tensor([[4, 5, 2]])).shape
        torch.Size([1, 3, 4])
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        unused = 0 if padding_idx is None else padding_idx + 1
        self.max_positions = num_embeddings - unused

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return vectors of the places of words, (rows, length, dim).

        Args:
            input (torch.Tensor): Words, (rows, length).
        """
        return super().forward(make_positions(input, self.padding_idx or 0))


class SinusoidalPositionalEmbedding(nn.Module):
    """Sines and cosines of the position, of wave lengths from 2 pi to 20000 pi.

    The first half of a vector is sines, the second cosines; padding is 0.

    Args:
        embedding_dim (int): Width.
        padding_idx (int | None): The number of padding; None: none.
        init_size (int, default 1024): Positions that are computed at first.

    Source: Vaswani and others, "Attention Is All You Need", 2017, part 3.5, in the
    order of tensor2tensor, as in fairseq.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.modules import SinusoidalPositionalEmbedding
        >>> SinusoidalPositionalEmbedding(4, 1)(torch.tensor([[4, 5, 2]])).shape
        torch.Size([1, 3, 4])
    """

    _float_tensor: torch.Tensor

    def __init__(
        self, embedding_dim: int, padding_idx: int | None, init_size: int = 1024
    ) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx if padding_idx is not None else 0
        self.weights = self.get_embedding(init_size, embedding_dim, padding_idx)
        # Says device and dtype. Saved, since releases of fairseq before June 2023 ask
        # for it; later ones neither write it nor mind.
        self.register_buffer("_float_tensor", torch.zeros(1))
        self.max_positions = _MOST

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Drop what a release has saved of this: the waves are computed, and
        `_float_tensor` is memory that was never written to, or not there.

        Args:
            state_dict (dict[str, Any]): Tensors by name.
            name (str): With which the keys begin.
        """
        prefix = f"{name}." if name else ""
        state_dict.pop(f"{prefix}weights", None)
        state_dict[f"{prefix}_float_tensor"] = torch.zeros(1, device="cpu")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        self.upgrade_state_dict_named(state_dict, prefix.removesuffix("."))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @staticmethod
    def get_embedding(
        num_embeddings: int, embedding_dim: int, padding_idx: int | None = None
    ) -> torch.Tensor:
        """Return the waves, in host memory: (num_embeddings, embedding_dim); an odd one
        ends in 0.

        Args:
            num_embeddings (int): Positions.
            embedding_dim (int): Width.
            padding_idx (int | None, default None): The position that is 0; None: none.
        """
        half = embedding_dim // 2
        step = math.log(10000) / max(half - 1, 1)
        number = functools.partial(torch.arange, dtype=torch.float32, device="cpu")
        rates = torch.exp(number(half) * -step)
        angles = number(num_embeddings)[:, None] * rates
        waves = [torch.sin(angles), torch.cos(angles)]
        if embedding_dim % 2 == 1:
            waves.append(torch.zeros(num_embeddings, 1, device="cpu"))
        table = torch.cat(waves, dim=1)
        if padding_idx is not None:
            table[padding_idx] = 0
        return table

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return vectors of the places of words, (rows, length, dim).

        Args:
            input (torch.Tensor): Words, (rows, length).
        """
        needed = self.padding_idx + 1 + input.size(1)
        if needed > self.weights.size(0):
            self.weights = self.get_embedding(
                needed, self.embedding_dim, self.padding_idx
            )
        self.weights = self.weights.to(self._float_tensor)
        return self.weights[make_positions(input, self.padding_idx)]


def PositionalEmbedding(
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None,
    learned: bool = False,
) -> LearnedPositionalEmbedding | SinusoidalPositionalEmbedding:
    """Return vectors of positions, learnt or not.

    Args:
        num_embeddings (int): Positions.
        embedding_dim (int): Width.
        padding_idx (int | None): The number of padding; None: none.
        learned (bool, default False): Learn them.
    """
    unused = 0 if padding_idx is None else padding_idx + 1
    if not learned:
        return SinusoidalPositionalEmbedding(
            embedding_dim, padding_idx, num_embeddings + unused
        )
    positions = num_embeddings + unused
    return drawn(LearnedPositionalEmbedding(positions, embedding_dim, padding_idx))
