"""torch's own layers with fairseq's names and initial values."""

from __future__ import annotations

from typing import TypeVar

from torch import nn


class FairseqDropout(nn.Dropout):
    """nn.Dropout that knows which module it is of.

    Args:
        p (float): Probability of a zero.
        module_name (str | None, default None): Of the module.

    Example:
        >>> from ctrainer.fairseq.modules import FairseqDropout
        >>> FairseqDropout(0.1, "decoder").module_name
        'decoder'
    """

    def __init__(self, p: float, module_name: str | None = None) -> None:
        super().__init__(p)
        self.module_name = module_name


def LayerNorm(
    normalized_shape: int,
    eps: float = 1e-5,
    elementwise_affine: bool = True,
    export: bool = False,
) -> nn.LayerNorm:
    """Return nn.LayerNorm.

    Args:
        normalized_shape (int): Width of the last dimension.
        eps (float, default 1e-05): Added to the variance.
        elementwise_affine (bool, default True): Learn a scale and a shift.
        export (bool, default False): Not read.
    """
    return nn.LayerNorm(normalized_shape, eps, elementwise_affine)


def Embedding(
    num_embeddings: int, embedding_dim: int, padding_idx: int | None
) -> nn.Embedding:
    """Return vectors of words, normal with deviation embedding_dim ** -0.5, and 0 for
    padding.

    Args:
        num_embeddings (int): Words.
        embedding_dim (int): Width.
        padding_idx (int | None): The number of padding; None: none.
    """
    return drawn(nn.Embedding(num_embeddings, embedding_dim, padding_idx))


def Linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """Return a linear layer of Xavier's uniform weights, with a bias of 0.

    Args:
        in_features, out_features (int): Widths.
        bias (bool, default True): Have a bias.
    """
    module = nn.Linear(in_features, out_features, bias)
    nn.init.xavier_uniform_(module.weight)
    if bias:
        nn.init.zeros_(module.bias)
    return module


E = TypeVar("E", bound=nn.Embedding)


def drawn(module: E) -> E:
    """The module, its vectors drawn anew and that of padding 0."""
    nn.init.normal_(module.weight, mean=0, std=module.embedding_dim**-0.5)
    if module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])
    return module
