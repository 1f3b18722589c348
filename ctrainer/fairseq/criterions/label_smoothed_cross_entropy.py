"""Cross entropy with smoothed labels, by the name of fairseq's module.

The target has the weight 1 - eps, the other words share eps evenly.
Source: Szegedy and others, Rethinking the Inception Architecture (2016), part 7.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ctrainer.fairseq import metrics
from ctrainer.fairseq.config.tasks import LabelSmoothedCrossEntropyCriterionConfig
from ctrainer.fairseq.criterions import FairseqCriterion, register_criterion
from ctrainer.fairseq.criterions.cross_entropy import log_accuracy, log_perplexity


def label_smoothed_nll_loss(
    lprobs: torch.Tensor,
    target: torch.Tensor,
    epsilon: float,
    ignore_index: int | None = None,
    reduce: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(smoothed loss, plain loss) in nats: sums, or with reduce=False one a target.

    lprobs: (..., words); target: (...), or (..., 1).
    """
    if target.dim() == lprobs.dim() - 1:
        target = target.unsqueeze(-1)
    words = lprobs.size(-1)
    # A word that is ignored need not be one of the vocabulary, such as -100.
    nll_loss = -lprobs.gather(-1, target.clamp(0, words - 1))
    spread = -lprobs.sum(-1, keepdim=True)
    if ignore_index is None:
        nll_loss, spread = nll_loss.squeeze(-1), spread.squeeze(-1)
    else:
        ignored = target == ignore_index
        nll_loss = nll_loss.masked_fill(ignored, 0.0)
        spread = spread.masked_fill(ignored, 0.0)
    if reduce:
        nll_loss, spread = nll_loss.sum(), spread.sum()
    share = epsilon / (words - 1)
    return (1.0 - epsilon - share) * nll_loss + share * spread, nll_loss


@register_criterion(
    "label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LabelSmoothedCrossEntropyCriterion(FairseqCriterion):
    """Logged in bits a word: loss, smoothed, and nll_loss, not smoothed; ppl of the
    latter; with report_accuracy the share of words that are right, in percent."""

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
    ) -> None:
        super().__init__(task)
        self.sentence_avg = sentence_avg
        self.eps = label_smoothing
        self.ignore_prefix_size = ignore_prefix_size
        self.report_accuracy = report_accuracy

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> Any:
        net_output = model(**sample["net_input"])
        loss, nll_loss = self.compute_loss(model, net_output, sample, reduce=reduce)
        sentences = sample["target"].size(0)
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.data,
            "nll_loss": nll_loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            correct, total = self.compute_accuracy(model, net_output, sample)
            logging_output["n_correct"], logging_output["total"] = correct, total
        return loss, sample_size, logging_output

    def get_lprobs_and_target(
        self, model: Any, net_output: Any, sample: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions, words) of log probabilities and (positions,) of targets."""
        lprobs = model.get_normalized_probs(net_output, log_probs=True)
        target = model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            lprobs = lprobs[:, self.ignore_prefix_size :].contiguous()
            target = target[:, self.ignore_prefix_size :].contiguous()
        return lprobs.view(-1, lprobs.size(-1)), target.view(-1)

    def compute_loss(
        self, model: Any, net_output: Any, sample: Any, reduce: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lprobs, target = self.get_lprobs_and_target(model, net_output, sample)
        return label_smoothed_nll_loss(
            lprobs, target, self.eps, self.padding_idx, reduce
        )

    def compute_accuracy(
        self, model: Any, net_output: Any, sample: Any
    ) -> tuple[int, int]:
        """(words that are right, words)."""
        lprobs, target = self.get_lprobs_and_target(model, net_output, sample)
        counted = target != self.padding_idx
        right = (lprobs.argmax(1) == target) & counted
        return int(right.sum()), int(counted.sum())

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        nll_loss = sum(log.get("nll_loss", 0) for log in logging_outputs)
        tokens = sum(log.get("ntokens", 0) for log in logging_outputs)
        size = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / size / math.log(2), size, round=3)
        metrics.log_scalar("nll_loss", nll_loss / tokens / math.log(2), tokens, round=3)
        log_perplexity("nll_loss")
        log_accuracy(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
