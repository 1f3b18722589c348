"""The bases of models, by the name of fairseq's models/fairseq_model.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ctrainer.fairseq import utils
from ctrainer.fairseq.models.fairseq_decoder import FairseqDecoder
from ctrainer.fairseq.models.fairseq_encoder import FairseqEncoder
from ctrainer.fairseq.registry import Registered


class BaseFairseqModel(Registered, nn.Module):
    """The interface of models for the Trainer and criterions.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.models import BaseFairseqModel
        >>> class Net(BaseFairseqModel):
        ...     def forward(self, x):
        ...         return x
        >>> logits = Net()(torch.zeros(1, 4))
        >>> Net().get_normalized_probs(logits, log_probs=False)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Return a new model for a task.

        Args:
            args: Options of the model as attributes.
            task: The task.
        """
        raise NotImplementedError("Model must implement the build_model method")

    def get_targets(self, sample: Any, net_output: Any) -> Any:
        """Return what the net's output is compared with.

        Args:
            sample: A batch.
            net_output: What forward() returned.
        """
        return sample["target"]

    def get_normalized_probs(
        self, net_output: Any, log_probs: bool, sample: Any = None
    ) -> torch.Tensor:
        """Return probabilities, or their logarithms, in float32, by the decoder where
        there is one.

        Args:
            net_output: What forward() returned.
            log_probs (bool): Return logarithms.
            sample (default None): The batch.
        """
        decoder: Any = getattr(self, "decoder", None)
        if decoder is not None:
            found: torch.Tensor = decoder.get_normalized_probs(
                net_output, log_probs, sample
            )
            return found
        if torch.is_tensor(net_output):
            normalise = utils.log_softmax if log_probs else utils.softmax
            return normalise(net_output, dim=-1)
        raise NotImplementedError(
            f"{type(self).__name__} has no decoder and its output is no tensor; "
            "override get_normalized_probs()"
        )

    def max_positions(self) -> Any:
        """Return the longest samples that it takes: a number, a pair, or None."""
        return None

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: dict[str, Any],
        strict: bool = True,
        model_cfg: Any = None,
        args: Any = None,
    ) -> Any:
        """Load a state after upgrade_state_dict(); return missing and unexpected keys,
        as torch.

        Args:
            state_dict (dict[str, Any]): Tensors by name; it stays as it is.
            strict (bool, default True): Raise RuntimeError for missing and unexpected
                keys.
            model_cfg, args (default None): Not read.
        """
        state_dict = dict(state_dict)
        self.upgrade_state_dict(state_dict)
        return super().load_state_dict(state_dict, strict)

    def upgrade_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring an older state dict up to date, in place.

        Args:
            state_dict (dict[str, Any]): Tensors by name.
        """
        self.upgrade_state_dict_named(state_dict, "")

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Bring the part of an older state dict up to date whose keys begin with a
        name: asks the modules within.

        Args:
            state_dict (dict[str, Any]): Tensors by name.
            name (str): The name.
        """
        prefix = f"{name}." if name else ""
        for path, module in self.named_modules():
            upgrade: Any = getattr(module, "upgrade_state_dict_named", None)
            if path and upgrade is not None:
                upgrade(state_dict, prefix + path)

    def set_num_updates(self, num_updates: int) -> None:
        """Pass the number to the modules that have a set_num_updates().

        Args:
            num_updates (int): Updates done.
        """
        for module in self.modules():
            method: Any = getattr(module, "set_num_updates", None)
            if module is not self and method is not None:
                method(num_updates)


class FairseqEncoderDecoderModel(BaseFairseqModel):
    """An encoder and a decoder.

    Args:
        encoder: A FairseqEncoder.
        decoder: A FairseqDecoder.

    Raises:
        TypeError: they are of other classes.
    """

    def __init__(self, encoder: Any, decoder: Any) -> None:
        super().__init__()
        _check("encoder", encoder, FairseqEncoder)
        _check("decoder", decoder, FairseqDecoder)
        self.encoder = encoder
        self.decoder = decoder

    def forward(
        self,
        src_tokens: torch.Tensor,
        src_lengths: torch.Tensor,
        prev_output_tokens: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        """Return the decoder's output.

        Args:
            src_tokens (torch.Tensor): Numbers of source words, (rows, source length).
            src_lengths (torch.Tensor): Their numbers without padding, (rows,).
            prev_output_tokens (torch.Tensor): The target moved by one, (rows, target
                length).
            **kwargs: Of encoder and decoder.
        """
        encoder_out = self.encoder(src_tokens, src_lengths=src_lengths, **kwargs)
        return self.decoder(prev_output_tokens, encoder_out=encoder_out, **kwargs)

    def max_positions(self) -> Any:
        return self.encoder.max_positions(), self.decoder.max_positions()


class FairseqLanguageModel(BaseFairseqModel):
    """A decoder alone.

    Args:
        decoder: A FairseqDecoder.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        _check("decoder", decoder, FairseqDecoder)
        self.decoder = decoder

    def forward(self, src_tokens: torch.Tensor, **kwargs: Any) -> Any:
        """Return the decoder's output.

        Args:
            src_tokens (torch.Tensor): The words before, (rows, length).
            **kwargs: Of the decoder.
        """
        return self.decoder(src_tokens, **kwargs)

    def max_positions(self) -> Any:
        return self.decoder.max_positions()

    @property
    def supported_targets(self) -> set[str]:
        """Which of "self", "future" and "past" it can learn."""
        return {"future"}


def _check(role: str, module: Any, base: type) -> None:
    if not isinstance(module, base):
        raise TypeError(
            f"the {role} must be a {base.__name__}, got a {type(module).__name__}"
        )
