"""fairseq's criterions against their formulas in NumPy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ctrainer.fairseq import metrics
from ctrainer.fairseq.criterions.cross_entropy import CrossEntropyCriterion
from ctrainer.fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
)

PAD, WORDS = 1, 7
TASK = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD))
TARGETS = np.array([[3, 4, 2, 5], [6, 2, PAD, PAD]])


class Scores(torch.nn.Module):
    """A model whose scores are its one parameter."""

    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.default_rng(3).normal(size=(2, 4, WORDS))
        self.scores = torch.nn.Parameter(torch.from_numpy(numbers))

    def forward(self) -> torch.Tensor:
        return self.scores

    def get_normalized_probs(self, net_output: Any, log_probs: bool) -> torch.Tensor:
        return net_output.log_softmax(-1)

    def get_targets(self, sample: Any, net_output: Any) -> torch.Tensor:
        found: torch.Tensor = sample["target"]
        return found


def sample() -> dict[str, Any]:
    tokens = int((TARGETS != PAD).sum())
    return {"net_input": {}, "target": torch.from_numpy(TARGETS), "ntokens": tokens}


def expected(smoothing: float, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Of each target -sum q log p, with q smoothed and with q plain; 0 for padding."""
    scores = Scores().scores.detach().numpy()
    log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    smoothed, plain = np.zeros((2, *TARGETS.shape))
    for row, column in np.argwhere(TARGETS != PAD):
        q = np.full(WORDS, smoothing / (WORDS - 1))
        q[TARGETS[row, column]] = 1 - smoothing
        smoothed[row, column] = -(q * log_p[row, column]).sum()
        plain[row, column] = -log_p[row, column, TARGETS[row, column]]
    return smoothed[:, first:], plain[:, first:]


def numbers_of(criterion: Any, log: dict[str, Any]) -> Any:
    with metrics.aggregate() as logged:
        criterion.reduce_metrics([log, log])
    return logged.get_smoothed_values()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("first", [0, 1])
def test_smoothed_labels_give_the_sum_of_the_formula(
    smoothing: float, first: int
) -> None:
    made = LabelSmoothedCrossEntropyCriterion(TASK, False, smoothing, first)
    smoothed, plain = expected(smoothing, first)
    loss, size, log = made(Scores(), sample())
    assert loss.item() == pytest.approx(smoothed.sum(), rel=1e-12)
    assert log["nll_loss"].item() == pytest.approx(plain.sum(), rel=1e-12)
    assert size == log["ntokens"] == 6
    each, _, _ = made(Scores(), sample(), reduce=False)
    np.testing.assert_allclose(each.detach(), smoothed.ravel(), rtol=1e-12)


def test_the_gradient_is_the_distance_from_the_smoothed_labels() -> None:
    model = Scores()
    loss, _, _ = LabelSmoothedCrossEntropyCriterion(TASK, False, 0.2)(model, sample())
    loss.backward()
    for row in range(2):
        for column in range(4):
            q = np.full(WORDS, 0.2 / (WORDS - 1))
            q[TARGETS[row, column]] = 0.8
            wanted = model.scores[row, column].softmax(-1).detach().numpy() - q
            wanted = wanted * (TARGETS[row, column] != PAD)
            assert model.scores.grad is not None
            np.testing.assert_allclose(
                model.scores.grad[row, column], wanted, atol=1e-14
            )


def test_both_losses_are_logged_in_bits_a_word_and_accuracy_in_percent() -> None:
    made = LabelSmoothedCrossEntropyCriterion(TASK, True, 0.1, report_accuracy=True)
    model = Scores()
    _, size, log = made(model, sample())
    assert size == log["nsentences"] == 2
    right = (model.scores.argmax(-1).numpy() == TARGETS) & (TARGETS != PAD)
    assert (log["n_correct"], log["total"]) == (right.sum(), 6)
    smoothed, plain = expected(0.1)
    found = numbers_of(made, log)
    assert found["loss"] == round(smoothed.sum() / 2 / math.log(2), 3)
    assert found["nll_loss"] == round(plain.sum() / 6 / math.log(2), 3)
    assert found["ppl"] == round(2 ** (plain.sum() / 6 / math.log(2)), 2)
    assert found["accuracy"] == round(right.sum() * 100 / 6, 3)


@pytest.mark.parametrize("by_sentence", [False, True])
def test_plain_cross_entropy_is_logged_in_bits_a_word(by_sentence: bool) -> None:
    made = CrossEntropyCriterion(TASK, by_sentence)
    loss, size, log = made(Scores(), sample())
    _, plain = expected(0.0)
    assert loss.item() == pytest.approx(plain.sum(), rel=1e-12)
    assert "nll_loss" not in log
    found = numbers_of(made, log)
    assert found["loss"] == round(plain.sum() / size / math.log(2), 3)
    bits = plain.sum() / 6 / math.log(2)
    assert found["ppl"] == round(2**bits, 2)
    assert found.get("nll_loss") == (round(bits, 3) if by_sentence else None)
