"""torch's own layers with fairseq's names and initial values."""

from __future__ import annotations

import torch
from torch import nn


class FairseqDropout(nn.Dropout):
    """nn.Dropout that is told which module it is of."""

    def __init__(self, p: float, module_name: str | None = None) -> None:
        super().__init__(p)
        self.module_name = module_name


def LayerNorm(
    normalized_shape: int,
    eps: float = 1e-5,
    elementwise_affine: bool = True,
    export: bool = False,
) -> nn.LayerNorm:
    return nn.LayerNorm(normalized_shape, eps, elementwise_affine)


def Embedding(
    num_embeddings: int, embedding_dim: int, padding_idx: int | None
) -> nn.Embedding:
    """Normal with deviation embedding_dim ** -0.5, and 0 for padding."""
    module = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
    nn.init.normal_(module.weight, mean=0, std=embedding_dim**-0.5)
    return _without_padding(module)


def Linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """Xavier's uniform weights, no bias at first."""
    module = nn.Linear(in_features, out_features, bias)
    nn.init.xavier_uniform_(module.weight)
    if bias:
        nn.init.zeros_(module.bias)
    return module


def _without_padding(module: nn.Embedding) -> nn.Embedding:
    if module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx] = 0
    return module
