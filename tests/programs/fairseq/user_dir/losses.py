"""A criterion with a dataclass."""

import math
from dataclasses import dataclass, field

import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics


@dataclass
class ScaledConfig(FairseqDataclass):
    scale: float = field(default=1.0, metadata={"help": "factor of the loss"})


@register_criterion("scaled", dataclass=ScaledConfig)
class Scaled(FairseqCriterion):
    def __init__(self, task, scale):
        super().__init__(task)
        self.scale = scale

    def forward(self, model, sample, reduce=True):
        output = model(**sample["net_input"])
        lprobs = model.get_normalized_probs(output, log_probs=True)
        target = model.get_targets(sample, output)
        loss = self.scale * F.nll_loss(
            lprobs.flatten(0, 1),
            target.flatten(),
            ignore_index=self.padding_idx,
            reduction="sum",
        )
        size = sample["ntokens"]
        return (
            loss,
            size,
            {
                "loss": loss.data,
                "ntokens": size,
                "nsentences": sample["nsentences"],
                "sample_size": size,
            },
        )

    @classmethod
    def reduce_metrics(cls, outputs):
        size = sum(log["sample_size"] for log in outputs)
        loss = sum(log["loss"] for log in outputs)
        metrics.log_scalar("loss", loss / size / math.log(2), size, round=3)
        metrics.log_scalar("scaled", 1, 1)

    @staticmethod
    def logging_outputs_can_be_summed():
        return True
