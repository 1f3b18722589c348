"""Cross entropy, by the name of fairseq's criterions/cross_entropy.py."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ctrainer.fairseq import metrics
from ctrainer.fairseq.config.tasks import CrossEntropyCriterionConfig
from ctrainer.fairseq.criterions import FairseqCriterion, register_criterion
from ctrainer.fairseq.meters import safe_round
from ctrainer.fairseq.utils import get_perplexity


def log_perplexity(of: str) -> None:
    """Log 2 to the loss `of`, which is in bits."""

    def perplexity(meters: Any) -> float:
        return get_perplexity(meters[of].avg)

    metrics.log_derived("ppl", perplexity)


@register_criterion("cross_entropy", dataclass=CrossEntropyCriterionConfig)
class CrossEntropyCriterion(FairseqCriterion):
    """Minus the log probability of the targets, padding aside, summed.

    The sample size is the number of target words, or with sentence_avg of sentences.
    Logged in bits a word: loss, and with sentence_avg nll_loss; ppl.
    """

    def __init__(self, task: Any, sentence_avg: bool) -> None:
        super().__init__(task)
        self.sentence_avg = sentence_avg

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> Any:
        net_output = model(**sample["net_input"])
        loss, _ = self.compute_loss(model, net_output, sample, reduce=reduce)
        sentences = sample["target"].size(0)
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": sample_size,
        }
        return loss, sample_size, logging_output

    def compute_loss(
        self, model: Any, net_output: Any, sample: Any, reduce: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss in nats, twice: a sum, or with reduce=False one a position."""
        lprobs = model.get_normalized_probs(net_output, log_probs=True)
        loss = F.nll_loss(
            lprobs.view(-1, lprobs.size(-1)),
            model.get_targets(sample, net_output).view(-1),
            ignore_index=self.padding_idx,
            reduction="sum" if reduce else "none",
        )
        return loss, loss

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        tokens = sum(log.get("ntokens", 0) for log in logging_outputs)
        size = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / size / math.log(2), size, round=3)
        if size != tokens:
            metrics.log_scalar("nll_loss", loss / tokens / math.log(2), tokens, round=3)
        log_perplexity("loss" if size == tokens else "nll_loss")

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def log_accuracy(logging_outputs: list[dict[str, Any]]) -> None:
    """Log total, n_correct and accuracy, in percent, where outputs have them."""
    total = sum(log.get("total", 0) for log in logging_outputs)
    if not total > 0:
        return
    correct = sum(log.get("n_correct", 0) for log in logging_outputs)
    metrics.log_scalar("total", total)
    metrics.log_scalar("n_correct", correct)
    metrics.log_derived("accuracy", _accuracy)


def _accuracy(meters: Any) -> Any:
    return safe_round(meters["n_correct"].sum * 100.0 / meters["total"].sum, 3)
