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


@register_criterion("cross_entropy", dataclass=CrossEntropyCriterionConfig)
class CrossEntropyCriterion(FairseqCriterion):
    """Minus the log probability of the targets, padding aside, summed.

    The sample size is the number of target words, or with sentence_avg of sentences.
    Logged in bits a word: loss, and nll_loss where that is another number; ppl.
    """

    def __init__(self, task: Any, sentence_avg: bool) -> None:
        super().__init__(task)
        self.sentence_avg = sentence_avg

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> Any:
        net_output = model(**sample["net_input"])
        loss, nll_loss = self.compute_loss(model, net_output, sample, reduce=reduce)
        sentences = sample["target"].size(0)
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": sample_size,
            **self.logged(model, net_output, sample),
        }
        if nll_loss is not loss:
            logging_output["nll_loss"] = nll_loss.data
        return loss, sample_size, logging_output

    def logged(self, model: Any, net_output: Any, sample: Any) -> dict[str, Any]:
        """What else the logging output has: n_correct and total for the accuracy."""
        return {}

    def scored(
        self, model: Any, net_output: Any, sample: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, length, words) of log probabilities and (rows, length) of targets."""
        log_probs = model.get_normalized_probs(net_output, log_probs=True)
        return log_probs, model.get_targets(sample, net_output)

    def compute_loss(
        self, model: Any, net_output: Any, sample: Any, reduce: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the one that gives the perplexity, here the same, in nats: a
        sum, or with reduce=False one a position."""
        log_probs, targets = self.scored(model, net_output, sample)
        loss = F.nll_loss(
            log_probs.flatten(0, -2),
            targets.flatten(),
            ignore_index=self.padding_idx,
            reduction="sum" if reduce else "none",
        )
        return loss, loss

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        def total(key: str) -> Any:
            return sum(log.get(key, 0) for log in logging_outputs)

        tokens, size = total("ntokens"), total("sample_size")
        has_plain = any("nll_loss" in log for log in logging_outputs)
        plain, by_token = "nll_loss" if has_plain else "loss", "loss"
        metrics.log_scalar("loss", total("loss") / size / math.log(2), size, round=3)
        if has_plain or size != tokens:
            by_token = "nll_loss"
            bits = total(plain) / tokens / math.log(2)
            metrics.log_scalar(by_token, bits, tokens, round=3)

        def perplexity(meters: Any) -> float:
            return get_perplexity(meters[by_token].avg)

        metrics.log_derived("ppl", perplexity)
        if total("total") > 0:
            metrics.log_scalar("total", total("total"))
            metrics.log_scalar("n_correct", total("n_correct"))
            metrics.log_derived("accuracy", _accuracy)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def _accuracy(meters: Any) -> Any:
    return safe_round(meters["n_correct"].sum * 100.0 / meters["total"].sum, 3)
