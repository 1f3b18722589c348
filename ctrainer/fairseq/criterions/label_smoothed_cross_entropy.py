"""Cross entropy against smoothed labels, by the name of fairseq's module."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer.fairseq.config.tasks import LabelSmoothedCrossEntropyCriterionConfig
from ctrainer.fairseq.criterions import register_criterion
from ctrainer.fairseq.criterions.cross_entropy import CrossEntropyCriterion


def smoothed_cross_entropy(
    log_probs: torch.Tensor, targets: torch.Tensor, smoothing: float, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross entropy of each target in nats, with smoothed and with plain labels.

    A smoothed label gives its word the weight 1 - smoothing, and the rest to all other
    words in equal shares.
    Source: Szegedy et al., Rethinking the Inception Architecture (2016), section 7.

    Args:
        log_probs: (..., words).
        targets: (...), numbers of words; where one is `ignored`, both results are 0.
    """
    counts = targets != ignored
    chosen = targets.masked_fill(~counts, 0).unsqueeze(-1)
    plain = -log_probs.gather(-1, chosen).squeeze(-1)
    share = smoothing / (log_probs.size(-1) - 1)
    smoothed = (1 - smoothing - share) * plain - share * log_probs.sum(-1)
    return smoothed.masked_fill(~counts, 0), plain.masked_fill(~counts, 0)


@register_criterion(
    "label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LabelSmoothedCrossEntropyCriterion(CrossEntropyCriterion):
    """The loss is that of smoothed labels; nll_loss, of plain ones, gives the
    perplexity. The first ignore_prefix_size words of a target do not count."""

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
    ) -> None:
        super().__init__(task, sentence_avg)
        self.eps = label_smoothing
        self.ignore_prefix_size = ignore_prefix_size
        self.report_accuracy = report_accuracy

    def scored(
        self, model: Any, net_output: Any, sample: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, length, words) of log probabilities and (rows, length) of targets."""
        log_probs, targets = super().scored(model, net_output, sample)
        first = self.ignore_prefix_size
        return log_probs[:, first:], targets[:, first:]

    def compute_loss(
        self, model: Any, net_output: Any, sample: Any, reduce: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, targets = self.scored(model, net_output, sample)
        losses = smoothed_cross_entropy(log_probs, targets, self.eps, self.padding_idx)
        smoothed, plain = (t.sum() if reduce else t.flatten() for t in losses)
        return smoothed, plain

    def logged(self, model: Any, net_output: Any, sample: Any) -> dict[str, Any]:
        if not self.report_accuracy:
            return {}
        log_probs, targets = self.scored(model, net_output, sample)
        counts = targets != self.padding_idx
        right = (log_probs.argmax(-1) == targets) & counts
        return {"n_correct": int(right.sum()), "total": int(counts.sum())}
