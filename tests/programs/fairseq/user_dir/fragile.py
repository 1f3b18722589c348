"""A criterion that fails once a batch has more words than it is told."""

from dataclasses import dataclass, field

from ctrainer.fairseq.config import FairseqDataclass
from ctrainer.fairseq.criterions import register_criterion
from ctrainer.fairseq.criterions.cross_entropy import CrossEntropyCriterion


@dataclass
class Fragile(FairseqDataclass):
    most: int = field(default=0, metadata={"help": "words of a batch at most"})


@register_criterion("fragile", dataclass=Fragile)
class FragileCriterion(CrossEntropyCriterion):
    def __init__(self, task, most):
        super().__init__(task, False)
        self.most = most

    def forward(self, model, sample, reduce=True):
        if sample["ntokens"] > self.most:
            raise RuntimeError(f"{sample['ntokens']} words")
        return super().forward(model, sample, reduce)
