"""The bases of models, by the name of fairseq's models/fairseq_model.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ctrainer.fairseq import utils
from ctrainer.fairseq.config.command_line import add_options
from ctrainer.fairseq.models.fairseq_decoder import FairseqDecoder
from ctrainer.fairseq.models.fairseq_encoder import FairseqEncoder


class BaseFairseqModel(nn.Module):
    """What the Trainer and criterions ask of any model."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Declare the options of the class's dataclass, where it has one."""
        dataclass = getattr(cls, "__dataclass", None)
        if dataclass is not None:
            add_options(parser, dataclass)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """A new model of the config `args`, for a task."""
        raise NotImplementedError("Model must implement the build_model method")

    def get_targets(self, sample: Any, net_output: Any) -> Any:
        """What the net's output is compared with."""
        return sample["target"]

    def get_normalized_probs(
        self, net_output: Any, log_probs: bool, sample: Any = None
    ) -> torch.Tensor:
        """Probabilities, or their logarithms, in float32, by the decoder where there
        is one."""
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

    def extract_features(self, *args: Any, **kwargs: Any) -> Any:
        """What comes before the output layer."""
        return self(*args, **kwargs)

    def max_positions(self) -> Any:
        """The longest samples that it takes: a number, a pair, or None for any."""
        return None

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: dict[str, Any],
        strict: bool = True,
        model_cfg: Any = None,
        args: Any = None,
    ) -> Any:
        """As torch's, after upgrade_state_dict(); state_dict itself stays as it is."""
        state_dict = dict(state_dict)
        self.upgrade_state_dict(state_dict)
        return super().load_state_dict(state_dict, strict)

    def upgrade_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring an older state dict up to date, in place."""
        self.upgrade_state_dict_named(state_dict, "")

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """The same for keys that begin with `name`: asks the modules within."""
        prefix = f"{name}." if name else ""
        for path, module in self.named_modules():
            upgrade: Any = getattr(module, "upgrade_state_dict_named", None)
            if path and upgrade is not None:
                upgrade(state_dict, prefix + path)

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the modules within that have a set_num_updates()."""
        for module in self.modules():
            told: Any = getattr(module, "set_num_updates", None)
            if module is not self and told is not None:
                told(num_updates)


class FairseqEncoderDecoderModel(BaseFairseqModel):
    """An encoder and a decoder.

    Raises TypeError where they are not of FairseqEncoder and FairseqDecoder.
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
        """The decoder's output; src_tokens (rows, source length), src_lengths (rows,),
        prev_output_tokens (rows, target length)."""
        encoder_out = self.encoder(src_tokens, src_lengths=src_lengths, **kwargs)
        return self.decoder(prev_output_tokens, encoder_out=encoder_out, **kwargs)

    def extract_features(
        self,
        src_tokens: torch.Tensor,
        src_lengths: torch.Tensor,
        prev_output_tokens: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        encoder_out = self.encoder(src_tokens, src_lengths=src_lengths, **kwargs)
        return self.decoder.extract_features(
            prev_output_tokens, encoder_out=encoder_out, **kwargs
        )

    def output_layer(self, features: torch.Tensor, **kwargs: Any) -> Any:
        return self.decoder.output_layer(features, **kwargs)

    def max_positions(self) -> Any:
        return self.encoder.max_positions(), self.decoder.max_positions()


class FairseqLanguageModel(BaseFairseqModel):
    """A decoder alone."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        _check("decoder", decoder, FairseqDecoder)
        self.decoder = decoder

    def forward(self, src_tokens: torch.Tensor, **kwargs: Any) -> Any:
        """The decoder's output for the words before, (rows, length)."""
        return self.decoder(src_tokens, **kwargs)

    def extract_features(self, src_tokens: torch.Tensor, **kwargs: Any) -> Any:
        return self.decoder.extract_features(src_tokens, **kwargs)

    def output_layer(self, features: torch.Tensor, **kwargs: Any) -> Any:
        return self.decoder.output_layer(features, **kwargs)

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
