"""A model of the old kind, which declares its options with argparse."""

import torch
from fairseq.models import (
    FairseqDecoder,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from torch import nn


class Decoder(FairseqDecoder):
    def __init__(self, dictionary, width):
        super().__init__(dictionary)
        self.embed = nn.Embedding(len(dictionary), width, dictionary.pad())
        self.out = nn.Linear(width, len(dictionary))

    def forward(self, prev_output_tokens, encoder_out=None, **unused):
        return self.out(torch.tanh(self.embed(prev_output_tokens))), {}

    def max_positions(self):
        return 64


@register_model("bigrams")
class Bigrams(FairseqLanguageModel):
    @staticmethod
    def add_args(parser):
        parser.add_argument("--width", type=int, metavar="N")

    @classmethod
    def build_model(cls, args, task):
        print("width", args.width)
        return cls(Decoder(task.target_dictionary, args.width))

    def forward(self, src_tokens, src_lengths):
        return self.decoder(src_tokens)


@register_model_architecture("bigrams", "bigrams")
def base(args):
    args.width = getattr(args, "width", 8)


@register_model_architecture("bigrams", "bigrams_wide")
def wide(args):
    args.width = getattr(args, "width", 24)
    base(args)
